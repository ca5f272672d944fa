# Two processes, two environments: the server's PyTriton needs NumPy 1, the actor's vLLM needs NumPy 2.

PYTHON ?= python3
# Searched for the CPU build of torch if pip's own index (such as PyPI) lacks it.
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)

SERVER := .venv-server
ACTOR := .venv-actor
LOCK := requirements/lock
# Every package comes from a lock, whichever index serves it. DeepSpeed's build imports torch: isolated, it would not see it.
INSTALL = install -q --require-hashes --no-deps --no-build-isolation
# Otherwise that build looks for nvcc on a host with a GPU. No op of DeepSpeed is compiled, neither now nor by a run.
export DS_IGNORE_CUDA_DETECTION := 1

.PHONY: envs
envs:
	@$(MAKE) --no-print-directory -j2 $(SERVER)/.complete-$(ACCELERATOR) $(ACTOR)/.complete-$(ACCELERATOR)

# $(1) is an environment with torch and what DeepSpeed's build imports.
define BUILD_ENV
$(PYTHON) -m venv $(1)
$(1)/bin/pip $(INSTALL) -r $(LOCK)/build-$*.txt || $(1)/bin/pip $(INSTALL) -r $(LOCK)/build-$*.txt$(if $(TORCH_INDEX_URL), --extra-index-url $(TORCH_INDEX_URL))
endef

$(SERVER)/.complete-%: $(LOCK)/build-%.txt $(LOCK)/server-%.txt setup.py tools/require_glibc.py
	$(PYTHON) tools/require_glibc.py
	$(call BUILD_ENV,$(SERVER))
	$(SERVER)/bin/pip $(INSTALL) -r $(LOCK)/server-$*.txt
	$(SERVER)/bin/pip install -q --no-deps --no-build-isolation -e .
	touch $@

$(ACTOR)/.complete-%: $(LOCK)/build-%.txt $(LOCK)/actor-%.txt setup.py
	$(call BUILD_ENV,$(ACTOR))
	$(ACTOR)/bin/pip $(INSTALL) -r $(LOCK)/actor-$*.txt
	$(ACTOR)/bin/pip install -q --no-deps --no-build-isolation -e .
	touch $@

# Both, and what tests and lint need.
.PHONY: dev
dev:
	@$(MAKE) --no-print-directory -j2 $(SERVER)/.complete-$(ACCELERATOR) $(ACTOR)/.dev

$(ACTOR)/.dev: $(LOCK)/dev.txt $(ACTOR)/.complete-$(ACCELERATOR)
	$(ACTOR)/bin/pip $(INSTALL) -r $(LOCK)/dev.txt
	touch $@

# Resolves requirements/ into requirements/lock/. `upgrade` moves every version to the newest that requirements/ allow, in all
# environments at once; exact pins, and groups that move together, are listed there with their reasons.
.PHONY: lock upgrade
lock: .venv-lock/.complete
	TORCH_INDEX_URL=$(TORCH_INDEX_URL) .venv-lock/bin/python tools/lock.py $(MOVE)
upgrade: MOVE := --upgrade
upgrade: lock

# Known vulnerabilities of what the locks install. PyPI knows torch without the name of its CPU build.
.PHONY: audit
audit: $(foreach lock,actor-cpu actor-cuda server-cpu server-cuda dev,audit-$(lock))
audit-%: $(LOCK)/%.txt .venv-lock/.complete
	sed 's/+cpu / /' $< | .venv-lock/bin/pip-audit --strict --disable-pip --require-hashes -r /dev/stdin

.venv-lock/.complete: requirements/lock-tools.txt
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install -q -r requirements/lock-tools.txt
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

# Further checks before a commit lands in main: more kills, fuzz, other users, Slurm and Ray.
.PHONY: test-more
test-more: dev
	$(ACTOR)/bin/python -m pytest -m more

# The documentation as a site, in build/site. Every warning, a broken link among them, is an error.
.PHONY: docs
docs: dev
	$(ACTOR)/bin/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet --builder html docs build/site
	@echo "build/site/index.html"

# On a real Slurm; only root can install and start it.
.PHONY: test-cluster
test-cluster: dev
	tests/cluster/install.sh
	$(ACTOR)/bin/python -m pytest tests/cluster -n 0

# TRL's PPOTrainer and GRPOTrainer, the peers of `make bench`, in environments of their own.
define PEER_ENV
$(1)/.complete-%: $(LOCK)/build-%.txt requirements/$(2).txt
	$$(call BUILD_ENV,$(1))
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

# Faults at random moments of PPO runs, with ENGINES=2 STALENESS=1 of asynchronous ones. Each run must end with the bits of one
# without faults.
.PHONY: chaos
FAULTS ?= 40
ENGINES ?= 0
STALENESS ?= 0
BACKEND ?= pytriton
chaos: dev
	$(ACTOR)/bin/python -m tests.chaos.run --faults $(FAULTS) --seed $(SEED) --engines $(ENGINES) --staleness $(STALENESS) --backend $(BACKEND)

# Malformed requests to a critic server, with TARGET=native to one without Triton, with TARGET=engine to an engine. They must change
# nothing. ONLY=i repeats request i of this seed, TLS=1 gives the server a certificate.
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

# One to two hours, before a release: faults, malformed requests, and what must be learned, of real data and with any seed.
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
