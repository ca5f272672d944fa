"""examples/own_loop.py: the package's public parts in somebody else's loop."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf import parts
from tests.support.models import SHAPE, letter_tokenizer
from tests.support.paths import ROOT

pytestmark = pytest.mark.more

EXAMPLE = ROOT / "examples" / "own_loop.py"


def save_speller(folder: Path) -> Path:
    """A random Llama that writes letters."""
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": 29, "bos_token_id": 0, "eos_token_id": 1}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


def test_the_reward_rises_and_nothing_else_is_printed(tmp_path):
    command = [sys.executable, EXAMPLE, save_speller(tmp_path / "model")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rewards = [float(re.fullmatch(r"step \d+: reward (\d\.\d{3})", line)[1]) for line in done.stdout.splitlines()]
    assert rewards[0] < 0.1 and sum(rewards[-3:]) / 3 > 0.2


def test_it_is_as_short_as_it_says():
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_every_public_part_says_what_it_is():
    undocumented = [name for name in parts.__all__ if not (getattr(parts, name).__doc__ or "").strip()]
    assert undocumented == [] and set(re.findall(r"nsr\.(\w+)", EXAMPLE.read_text())) <= set(parts.__all__)
