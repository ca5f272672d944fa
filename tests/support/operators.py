"""Records the operators with which a process of ours computes, in all of its threads: of torch, but not of vLLM, which on a GPU
computes in other processes."""

import json
import os
import re
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

VARIABLE = "NSR_RECORD_OPERATORS"
"""Names the file."""
VLLM = ("_add", "_step", "_replace_weights", "sequence_logprobs", "preempt", "_sleep", "_wake_weights", "_wake_cache")
"""Methods of a generator in which vLLM computes."""
LOCK = threading.Lock()


def _float(tensor: Any, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype") or tensor.dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


RAISES: dict[str, tuple[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]]] = {
    "torch.nn.AvgPool3d": (r"avg_pool3d_backward", lambda *_: True),
    "torch.nn.AdaptiveAvgPool2d": (r"_?adaptive_avg_pool2d_backward", lambda *_: True),
    "torch.nn.AdaptiveAvgPool3d": (r"_?adaptive_avg_pool3d_backward", lambda *_: True),
    "torch.nn.AdaptiveMaxPool2d": (r"adaptive_max_pool2d_backward", lambda *_: True),
    "torch.nn.FractionalMaxPool2d": (r"fractional_max_pool2d_backward", lambda *_: True),
    "torch.nn.FractionalMaxPool3d": (r"fractional_max_pool3d_backward", lambda *_: True),
    "torch.nn.MaxUnpool1d": (r"max_unpool.*", lambda *_: True),
    "torch.nn.MaxUnpool2d": (r"max_unpool.*", lambda *_: True),
    "torch.nn.MaxUnpool3d": (r"max_unpool.*", lambda *_: True),
    "torch.nn.functional.interpolate": (r"_?upsample_.*_backward", lambda *_: True),
    "torch.nn.ReflectionPad1d": (r"reflection_pad1d_backward", lambda *_: True),
    "torch.nn.ReflectionPad2d": (r"reflection_pad2d_backward", lambda *_: True),
    "torch.nn.ReflectionPad3d": (r"reflection_pad3d_backward", lambda *_: True),
    "torch.nn.NLLLoss": (r"nll_loss.*", lambda *_: True),
    "torch.nn.CTCLoss": (r"_?ctc_loss_backward", lambda *_: True),
    "torch.nn.EmbeddingBag": (r"_embedding_bag.*_backward", lambda *_: True),
    "torch.Tensor.put_": (r"put_?", lambda *_: True),
    "torch.histc": (r"histc", lambda *_: True),
    "torch.bincount": (r"bincount", lambda args, kwargs: len(args) > 1 or kwargs.get("weights") is not None),
    "torch.median": (r"(nan)?median", lambda args, _: len(args) > 1),
    "torch.nn.functional.grid_sample": (r"grid_sampler.*_backward", lambda *_: True),
    "torch.cumsum": (r"cumsum_?", lambda args, kwargs: _float(args[0], kwargs)),
    "torch.Tensor.scatter_reduce": (r"scatter_reduce_?", lambda args, kwargs: "prod" in (*args, *kwargs.values())),
    "torch.Tensor.resize_": (r"resize_?", lambda args, _: args[0].is_quantized),
}
"""The operators that raise on a GPU with repeatable algorithms, by the name that torch's documentation has for it: a pattern of
the operator's name, and whether a call with these arguments is meant."""


def documented() -> set[str]:
    """The names in the documentation of the installed torch."""
    text = str(torch.use_deterministic_algorithms.__doc__)
    raising = text.partition("will throw a\n    :class:`RuntimeError` when ``mode=True``")[2].partition("In addition")[
        0
    ]
    return set(re.findall(r"^ *\* :(?:class|func):`([\w.]+)`", raising, re.MULTILINE))


def raising(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(re.fullmatch(pattern, name) and meant(args, kwargs) for pattern, meant in RAISES.values())


class _Recorder(TorchDispatchMode):
    def __init__(self, seen: dict[str, bool], file: Path) -> None:
        super().__init__()
        self._seen, self._file = seen, file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        raises = raising(name, args, kwargs or {})
        if name not in self._seen or raises > self._seen[name]:
            with LOCK:
                self._seen[name] = raises
                self._file.write_text(json.dumps(self._seen))  # now, since a server ends without an exit of Python's
        return func(*args, **(kwargs or {}))


def refused(file: Path) -> list[str]:
    """The recorded operators that would have raised on a GPU."""
    seen: dict[str, bool] = json.loads(file.read_text())
    assert "mm" in seen or "addmm" in seen, "nothing was recorded"
    return [name for name, raises in seen.items() if raises]


def record() -> None:
    """Write ``{operator: whether a call would have raised}`` to the file."""
    seen: dict[str, bool] = {}
    file = Path(os.environ[VARIABLE])
    if find_spec("vllm") is not None:  # the server has none
        from nemo_style_rlhf.generation.vllm import VLLMGenerator

        for name in ("__init__", *VLLM):
            setattr(VLLMGenerator, name, _unrecorded(getattr(VLLMGenerator, name)))
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]  # run itself is overridden by PyTriton's threads

    def recorded(thread: threading.Thread) -> None:
        with _Recorder(seen, file):
            run(thread)

    threading.Thread._bootstrap_inner = recorded  # type: ignore[attr-defined]
    _Recorder(seen, file).__enter__()  # to the end


def _unrecorded(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return call
