"""DeepSpeed starts without loading what nobody asked for."""

import subprocess
import sys

import pytest

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
