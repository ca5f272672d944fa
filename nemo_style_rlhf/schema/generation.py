"""Sampling responses."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, require_choice, setting
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.paths import CHECK
from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig

CPU_KV_CACHE_GIB = 1.0
"""Default size of the KV cache on a CPU, in GiB."""
INSTALL_VLLM = "pip install --no-deps --require-hashes --no-build-isolation -r requirements/lock/actor-cpu.txt"
"""In the repository."""


@dataclass(frozen=True)
class SamplingOverrides:
    """A prompt's own sampling settings; None takes the run's setting."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_length: int | None = None
    """Limit on response tokens, at most the run's."""
    min_length: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None

    @staticmethod
    def parse(given: object, where: str) -> "SamplingOverrides":
        """Parse a JSON object of a data row.

        Raises:
            UserError: a name is unknown or a value impossible.
        """
        known = {field.name for field in fields(SamplingOverrides)}
        if not isinstance(given, dict) or not given.keys() <= known:
            raise UserError(
                f"{where}: sampling settings {given!r:.200} are not possible: expected some of {', '.join(sorted(known))}"
            )
        for name, (possible, expected) in _POSSIBLE.items():
            if (value := given.get(name)) is not None and not possible(value):
                raise UserError(f"{where}: {name}={value!r:.100} is not possible: expected {expected}")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        return SamplingOverrides(**values)

    @property
    def cut(self) -> str:
        """The settings that exclude a part of the distribution, as text; empty if none does."""
        cuts = {
            "top_p": self.top_p not in (None, 1),
            "top_k": (self.top_k or 0) > 0,
            "min_length": bool(self.min_length),
        }
        return ", ".join(f"{name}={getattr(self, name)}" for name, cut in cuts.items() if cut)


NO_OVERRIDES = SamplingOverrides()


def _number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _whole(value: object, low: int) -> bool:
    return type(value) is int and value >= low


def _list(value: object, possible: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(possible, value))


_POSSIBLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    # Logits in float32, divided by a temperature outside of these bounds, leave no distribution to sample from.
    "temperature": (lambda value: _number(value, 1e-5, 1e5), "a number above 0, 1e-5 to 1e5"),
    "top_p": (lambda value: _number(value, 0, 1) and value > 0, "a number above 0, at most 1"),
    "top_k": (lambda value: _whole(value, -1), "a whole number, 0 or -1 for the whole vocabulary"),
    "max_length": (lambda value: _whole(value, 1), "a whole number above 0"),
    "min_length": (lambda value: _whole(value, 0), "a whole number from 0 up"),
    "stop": (lambda value: _list(value, lambda text: isinstance(text, str) and text != ""), "a list of texts"),
    "stop_token_ids": (lambda value: _list(value, lambda token: _whole(token, 0)), "a list of token ids"),
}
"""For each sampling setting, a check of its value, and a text of what is expected."""


def _installed(backend: str, _: object) -> str | None:
    if backend != "vllm" or importlib.util.find_spec("vllm") is not None:
        return None
    way = f"`{INSTALL_VLLM}` (with CUDA actor-cuda.txt)"
    return f"{sys.executable} has no vllm: run, in the repository, {way}, or give generation=hf, which is slower"


@dataclass
class GenerationConfig:
    """The generator, and its sampling settings."""

    backend: str = field(default="vllm", metadata={CHECK: _installed})
    """vllm, or hf: only transformers, slow, for architectures and head sizes that vLLM lacks."""
    max_length: int = setting(512, ge=1, expected="a number of tokens from 1 up")
    """Maximum tokens of a response (NeMo-Aligner: length_params.max_length)."""
    min_length: int = 0
    """Minimum tokens before an end-of-sequence token (NeMo-Aligner has 1); see top_p."""
    temperature: float = setting(1.0, gt=0, expected="a number above 0 (PPO needs sampling)")
    """Training log-probabilities use the same temperature."""
    top_p: float = setting(1.0, gt=0, le=1, expected="a number above 0, at most 1")
    """Below 1 the trainer cannot reproduce the sampler's log-probabilities: the audit reports the gap but does not stop."""
    top_k: int = 0
    """0 for the whole vocabulary; see top_p."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response; they stay part of it."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response, besides the end-of-sequence token."""
    ignore_eos: bool = False
    """Always generate max_length tokens (benchmarks)."""
    max_num_seqs: int = 256
    """Maximum number of sequences that vLLM decodes at a time."""
    max_num_batched_tokens: int | None = None
    """Maximum tokens of one vLLM scheduler step; longer prompts are split. null takes vLLM's default, 4096 on a CPU."""
    gpu_memory_utilization: float = 0.4
    """Share of the GPU's memory that vLLM may take; the trainer needs the rest."""
    kv_cache_gib: float | None = None
    """Size of vLLM's KV cache in GiB; null takes the rest of gpu_memory_utilization, or 1 GiB on a CPU."""
    tensor_parallel_size: int = setting(1, ge=1, expected="a number of ranks from 1 up")
    """Number of neighboring ranks that share one vLLM, each with a part of every layer; with generation.engines.count, number of
    devices of each engine."""
    enforce_eager: bool | None = None
    """false lets vLLM compile and capture CUDA graphs: faster decoding, a slower start. New weights leave them valid. null is
    true; on a GPU the run then says so."""

    @property
    def compiles(self) -> bool:
        """True if vLLM compiles the model."""
        return self.backend == "vllm" and self.enforce_eager is False

    def require_room(self, limit: int, of: str) -> None:
        """Check that a full response leaves room for a prompt.

        Args:
            limit: maximum tokens of a sequence.
            of: the end of "the LIMIT ...", such as ``positions of PATH``.

        Raises:
            UserError: a full response leaves no token to the prompt.
        """
        if self.max_length >= limit:
            raise UserError(
                f"generation.max_length={self.max_length} leaves no prompt a place in the {limit} {of}: lower "
                "generation.max_length"
            )

    def idle(self) -> Iterator[tuple[str, str]]:
        """See :func:`base.idle_settings`."""
        if self.backend == "hf":
            for name in ("max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_gib", "enforce_eager"):
                yield name, "does nothing: it is vLLM's, and generation.backend is hf"

    def validate(self) -> None:
        require_choice("generation.backend", self.backend, ("vllm", "hf"))
        require(
            0 <= self.min_length <= self.max_length,
            "generation.min_length",
            self.min_length,
            f"0 to {self.max_length} (max_length)",
        )
        budget = self.max_num_batched_tokens
        require(
            budget is None or budget >= self.max_num_seqs,
            "generation.max_num_batched_tokens",
            budget,
            f"at least generation.max_num_seqs={self.max_num_seqs}, which decode at a time, or null",
        )
        if self.backend == "hf" and (self.stop or self.tensor_parallel_size > 1):
            raise UserError(
                "generation.backend=hf knows neither generation.stop nor tensor_parallel_size: use stop_token_ids, or vllm"
            )

    @property
    def cut(self) -> str:
        """The settings that leave out a part of the distribution of the trainer's log-probabilities; empty if none does."""
        settings = {"top_p": self.top_p != 1.0, "top_k": self.top_k > 0, "min_length": self.min_length != 0}
        return ", ".join(f"generation.{name}={getattr(self, name):g}" for name, cuts in settings.items() if cuts)

    @property
    def samples_whole_distribution(self) -> bool:
        """True if log-probabilities of sampler and trainer refer to the same distribution."""
        return not self.cut


@dataclass
class EnginesConfig:
    """Generation engines: processes of their own (servers/serve_engine.py) that sample for the trainer."""

    count: int = setting(0, ge=0, expected="a number from 0 up")
    """Number of engines; 0 samples in the trainer's process."""
    launch: bool = True
    """Start the engines on this host, and restart one that dies or hangs. false waits for externally started engines, on this
    host or others, with --config-dir=<run.output_dir>/engines --config-name=this_run and a server.ready_file in that folder. All
    hosts must share the folder."""
    token: TokenConfig = field(default_factory=TokenConfig)
    """With launch=false, the secret with which the engines were started. Without it, requests carry the token of this user's own
    servers, see server.token."""
    tls: ClientTlsConfig = field(default_factory=ClientTlsConfig)
    """With launch=false, the files to verify engines that were started with server.tls."""
    weights: str = setting("auto", among=("auto", "gloo", "nccl"))
    """Transfer of new weights to engines: auto (from /dev/shm on the trainer's host, over HTTP one by one on others), gloo or
    nccl (all engines at once, in a torch.distributed group without a token; an engine that starts later gets them as by auto)."""
    threads: int = setting(0, ge=0, expected="a number from 0 up")
    """torch threads of each engine; 0 takes run.num_threads, so that samples have the same bits as in the trainer's process."""
    restarts: int = setting(3, ge=0, expected="a number from 0 up")
    """Maximum restarts of one engine for one version of the weights."""
    ready_timeout_s: float = setting(600.0, gt=0, expected="seconds above 0")
    """Longest wait for an engine that starts."""
    request_timeout_s: float = setting(600.0, gt=0, expected="seconds above 0")
    """Longest wait for an engine to load weights."""
    hung_after_s: float = setting(60.0, gt=0, expected="seconds above 0")
    """Seconds after which an engine counts as hung: it does not answer health checks, or has requests and does not advance. One
    step of a slow engine must take less."""

    def validate(self) -> None:
        self.tls.validate_in("generation.engines")
        for name, given in (("token.token_file", self.token.token_file), ("tls.ca", self.tls.ca)):
            advice = "null, or generation.engines.launch=false: it is for engines that somebody else starts"
            require(given is None or not self.launch, f"generation.engines.{name}", given, advice)


@dataclass
class TrainingGenerationConfig(GenerationConfig):
    """Sampling in a training run."""

    engines: EnginesConfig = field(default_factory=EnginesConfig)

    def idle(self) -> Iterator[tuple[str, str]]:
        yield from super().idle()
        if not self.engines.count:
            yield "engines", "does nothing: generation.engines.count=0 samples in the trainer's process"

    @property
    def sharing_ranks(self) -> int:
        """Number of neighboring ranks of the trainer that share one generator."""
        return 1 if self.engines.count else self.tensor_parallel_size
