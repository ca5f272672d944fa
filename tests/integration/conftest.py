"""Fixtures of critic servers: one that most tests share, and a factory for tests that must break one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from tests.support.critic_server import START, CriticServer
from tests.support.models import save_reward_model


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama reward model, 64 ids, 128 positions; pad is end-of-text."""
    return save_reward_model(tmp_path_factory.mktemp("reward_model"), pad_token_id=0)


@pytest.fixture(scope="session", params=["pytriton", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    """The ``server.backend`` of each server below: every test of theirs runs with both."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, reward_model: Path, backend: str) -> Iterator[CriticServer]:
    """A server for tests that keep it serving. The fixture ``critic`` restores its checkpoint ``START``: the untrained critic."""
    server = CriticServer(tmp_path_factory.mktemp("shared_server"), reward_model, backend=backend).start()
    with server.client() as critic:
        critic.save(START).result()
    yield server
    server.close()


@pytest.fixture
def critic(shared_server: CriticServer) -> Iterator[RemoteCritic]:
    """A client with the lease of the shared server, whose critic is at step 0."""
    with shared_server.client() as client:
        client.restore(START, None)
        yield client


@pytest.fixture
def make_server(tmp_path: Path, reward_model: Path, backend: str) -> Iterator[Callable[..., CriticServer]]:
    """``make_server(*overrides, environment=..., ranks=...)`` makes a server for one test, not started yet."""
    made: list[CriticServer] = []

    def make(*overrides: str, environment: dict[str, str] | None = None, ranks: int = 1) -> CriticServer:
        directory = tmp_path / f"server{len(made)}"
        made.append(
            CriticServer(directory, reward_model, list(overrides), environment or {}, ranks=ranks, backend=backend)
        )
        return made[-1]

    yield make
    for server in made:
        if hasattr(server, "process"):
            server.close()


@pytest.fixture(scope="module")
def scratch_server(
    tmp_path_factory: pytest.TempPathFactory, reward_model: Path, backend: str
) -> Iterator[CriticServer]:
    """May be killed, frozen and restarted, if it serves again afterwards."""
    server = CriticServer(tmp_path_factory.mktemp("scratch_server"), reward_model, backend=backend).start()
    yield server
    server.close()
