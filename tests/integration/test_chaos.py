"""Faults at random moments; `make chaos` has more."""

import secrets

import pytest

from tests.chaos.run import Kind, chaos

pytestmark = pytest.mark.more


@pytest.mark.parametrize(
    "kind", [Kind(), Kind(engines=2, staleness=1, backend="native")], ids=["in_process", "engines, native"]
)
def test_a_run_survives_whatever_happens(tmp_path, kind):
    seed = secrets.randbelow(2**31)
    print(f"make chaos FAULTS=3 SEED={seed} ENGINES={kind.engines} STALENESS={kind.staleness} BACKEND={kind.backend}")
    assert len(chaos(tmp_path, faults=3, seed=seed, kind=kind)) == 3
