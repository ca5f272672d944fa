"""Malformed requests to a critic server, an engine and a gateway, some with a certificate; `make fuzz` sends more."""

import secrets
from pathlib import Path

import pytest

from tests.fuzz import gateway
from tests.fuzz.run import fuzz

MORE = pytest.mark.more


@pytest.mark.parametrize(
    ("requests", "tls", "kind"),
    [
        (300, False, "critic"),
        (300, False, "native"),
        pytest.param(1700, False, "critic", marks=MORE),
        pytest.param(300, True, "critic", marks=MORE),
    ],
)
def test_malformed_requests_change_nothing(tmp_path: Path, requests: int, tls: bool, kind: str) -> None:
    """Every one is refused, nothing dies, grows or moves, and strangers read nothing but that they are none of ours."""
    seed = secrets.randbelow(2**31)
    print(f"make fuzz N={requests} SEED={seed}{' TLS=1' if tls else ''} TARGET={kind}")
    assert sum(fuzz(tmp_path, seed=seed, numbers=range(requests), tls=tls, kind=kind).values()) >= requests


@pytest.mark.parametrize("requests", [100, pytest.param(600, marks=MORE)])
def test_malformed_requests_leave_an_engine_its_weights_and_samples(tmp_path: Path, requests: int) -> None:
    """Every impossible one is refused; the engine neither ends nor hangs nor grows, and samples the same bits from the same
    version afterwards."""
    seed = secrets.randbelow(2**31)
    print(f"make fuzz N={requests} SEED={seed} TARGET=engine")
    assert sum(fuzz(tmp_path, seed=seed, numbers=range(requests), kind="engine").values()) >= requests


@pytest.mark.parametrize("requests", [100, pytest.param(600, marks=MORE)])
def test_malformed_requests_to_the_gateway_reach_no_other_session(tmp_path: Path, requests: int) -> None:
    """Every impossible one is refused with an error of the API; every session reads its own answers afterwards, and nobody any
    other's."""
    seed = secrets.randbelow(2**31)
    print(f"python -m tests.fuzz.gateway --requests {requests} --seed {seed}")
    assert sum(gateway.fuzz(tmp_path, seed=seed, numbers=range(requests)).values()) >= requests
