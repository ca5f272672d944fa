"""Scorers over real worker processes and real HTTP endpoints."""

import pytest

from nemo_style_rlhf.schema.judge import EndpointRewardConfig
from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.scoring.endpoints import EndpointScorer
from nemo_style_rlhf.scoring.function import FunctionScorer
from tests.unit.scoring.sources import REWARDS, Endpoint


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def functions(rewards_file):
    """Scorers that share their worker processes with every test of this module."""
    made = {
        "group": FunctionScorer(FunctionRewardConfig(path=str(rewards_file), weight=1.0, timeout_s=1.0, processes=1)),
        "single": FunctionScorer(
            FunctionRewardConfig(path=str(rewards_file), weight=1.0, per_sample=True, timeout_s=1.0, processes=2)
        ),
        "async": FunctionScorer(
            FunctionRewardConfig(path=str(rewards_file), weight=1.0, name="later", timeout_s=1.0, processes=1)
        ),
    }
    yield made
    for scorer in made.values():
        scorer.close()


@pytest.fixture
def endpoints():
    """Make endpoints, and scorers that are asked of; all are closed."""
    made = []

    def make(*behaviours):
        new = [Endpoint(behaviour) for behaviour in behaviours]
        made.extend(new)
        return new

    yield make
    for endpoint in made:
        endpoint.close()


@pytest.fixture
def scorer_of(monkeypatch):
    monkeypatch.setattr("nemo_style_rlhf.wire.balance.FIRST_RETRY_S", 0.05)
    made = []

    def make(*urls, **settings):
        settings = {"retries": 1, "timeout_s": 5.0, "cooldown_s": 0.6} | settings
        config = EndpointRewardConfig(urls=[getattr(url, "url", url) for url in urls], weight=1.0, **settings)
        config.validate()
        made.append(EndpointScorer(config))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()
