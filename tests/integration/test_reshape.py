"""A checkpoint of one ZeRO stage and number of ranks is that of any other."""

from pathlib import Path

import pytest
import torch

from nemo_style_rlhf.checkpoint.files import file_digests
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.errors import UserError
from tests.support import warm
from tests.support.reshaping import CASES, Case, make_engine, resume, write


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Every case's checkpoint, and what two ranks made of those they were to load."""
    folder = tmp_path_factory.mktemp("checkpoints")
    init_distributed(torch.device("cpu"))
    for case in CASES:
        if case.before[1] == 1:
            write(case, folder)
    done = warm.run(["tests/support/reshaping.py", str(folder)], ranks=2, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_of_it_comes_back_to_the_last_bit_and_training_goes_on(case: Case, written: Path) -> None:
    """Weights, fp32 masters, both moments, buffers, steps and schedule; and on disk nothing changes."""
    if case.after[1] == 1:
        files = file_digests(written / str(case))
        resume(case, written)
        assert file_digests(written / str(case)) == files
    (saved, expected), (loaded, further) = (
        torch.load(written / f"{case}.{when}.pt", weights_only=False) for when in ("before", "after")
    )
    assert saved["step"] == ([case.steps] if case.steps else [])
    assert saved.keys() == loaded.keys()
    for name, value in saved.items():
        assert torch.equal(value, loaded[name]) if isinstance(value, torch.Tensor) else value == loaded[name], name
    tolerance = 1e-5 if case.dtype == torch.float32 else 1e-3  # gradients in bf16 are rounded before they are added up
    for name, value in expected.items():
        if name.startswith("fp32"):
            torch.testing.assert_close(further[name], value, atol=tolerance, rtol=0, msg=name)
            assert not torch.equal(value, saved[name])
        elif not isinstance(value, torch.Tensor):
            assert value == further[name], name


def test_another_dtype_and_another_model_are_refused(written: Path) -> None:
    fp32, bf16 = (next(case for case in CASES if case.dtype == dtype) for dtype in (torch.float32, torch.bfloat16))
    with pytest.raises(UserError, match=r"taken with model\.dtype=bfloat16, this is float32"):
        make_engine(1, fp32).load(written / str(bf16))
    frozen = next(case for case in CASES if case.frozen)
    with pytest.raises(UserError, match="other trained parameters"):
        make_engine(1, frozen).load(written / str(fp32))
