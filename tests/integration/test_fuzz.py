"""Two thousand malformed requests; `make fuzz` has more."""

import secrets

from tests.fuzz.run import fuzz

REQUESTS = 2000


def test_malformed_requests_change_nothing(tmp_path):
    """Every one is refused, nothing dies, grows or moves, and strangers read nothing but that they are none of ours."""
    seed = secrets.randbelow(2**31)
    print(f"make fuzz N={REQUESTS} SEED={seed}")
    assert sum(fuzz(tmp_path, seed=seed, numbers=range(REQUESTS)).values()) >= REQUESTS
