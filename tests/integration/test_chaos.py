"""Six faults at random moments; `make chaos` has more."""

import secrets

from tests.chaos.run import chaos


def test_a_run_survives_whatever_happens(tmp_path):
    seed = secrets.randbelow(2**31)
    print(f"make chaos FAULTS=6 SEED={seed}")
    assert len(chaos(tmp_path, faults=6, seed=seed)) == 6
