"""DeepSpeed starts without loading what nobody asked for."""

import subprocess
import sys

import pytest

from nemo_style_rlhf.engine import deepspeed_private

PROGRAM = """
import sys
import torch
from nemo_style_rlhf.engine.process_group import init_distributed
init_distributed(torch.device("cpu"))
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.schema.common import EngineConfig
Engine(torch.nn.Linear(2, 2), EngineConfig(), device=torch.device("cpu"))
print("torch._inductor.lowering" in sys.modules)
"""


@pytest.mark.more
def test_it_does_not_load_inductor():
    """For an optimizer that nobody asked for, every start took 3 s more."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_no_op_is_tried_out(monkeypatch):
    """On a host without a compiler, or with a GPU but without nvcc, each start told of every op that could not be compiled."""
    import deepspeed
    from deepspeed.ops.op_builder import builder

    def fail(*_):
        raise AssertionError("an op is tried out")

    monkeypatch.setattr(builder, "probe_is_compatible", fail)
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    build = sys.modules["deepspeed.comm.torch"].build_shm_op
    with pytest.raises(AssertionError, match="is tried out"):
        build()
    deepspeed_private.compile_nothing()
    assert build() is None
