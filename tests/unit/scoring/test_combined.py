"""Several reward sources at once, and the settings they are refused for."""

import math
from concurrent.futures import Future

import pytest
import torch

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import validate
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from nemo_style_rlhf.schema.reward import CriticRewardConfig, EndpointRewardConfig, FunctionRewardConfig, RewardConfig
from nemo_style_rlhf.scoring.combined import CombinedScorer
from nemo_style_rlhf.scoring.contract import read_answer
from nemo_style_rlhf.scoring.interface import RewardError, Scores
from nemo_style_rlhf.scoring.remote import RemoteCriticScorer
from nemo_style_rlhf.wire.connection import ServerUnreachable
from tests.unit.scoring.sources import all_failed, result, samples


class Given:
    """A source whose answer is known."""

    def __init__(self, outcome):
        self.outcome, self.closed = outcome, False

    def score(self, samples):
        future = Future()
        if isinstance(self.outcome, Exception):
            future.set_exception(self.outcome)
        else:
            future.set_result(self.outcome)
        return future

    def close(self):
        self.closed = True


def test_rewards_add_up_by_weight(functions, endpoints, scorer_of):
    (endpoint,) = endpoints("rewards")
    sources = {"function": (functions["group"], 2.0), "endpoints": (scorer_of(endpoint), -0.5)}
    scores = result(CombinedScorer(sources, on_error="stop").score(samples("dict", "x", "x")))
    assert scores.rewards.tolist() == [2.0 - 9.5] * 3
    assert scores.filter_scores.tolist() == [1.0, 2.0, 3.0]
    assert {name: value.tolist() for name, value in scores.extra.items()} == {
        "function/length": [0.0, 1.0, 2.0],
        "endpoints/words": [2.0, 2.0, 2.0],
        "function/reward": [1.0, 1.0, 1.0],
        "endpoints/reward": [19.0, 19.0, 19.0],
    }
    assert scores.values is None and not scores.failures.any()


def test_a_source_of_weight_0_gives_its_values_only(functions):
    critic = Given(Scores(rewards=torch.tensor([math.inf, 5.0]), values=torch.arange(7.0)))
    scores = result(
        CombinedScorer({"critic": (critic, 0.0), "function": (functions["group"], 1.0)}, on_error="stop").score(
            samples("list", "x")
        )
    )
    assert scores.rewards.tolist() == [0.0, 1.0]
    assert scores.values.tolist() == list(range(7))
    assert "critic/reward" not in scores.extra and "function/reward" not in scores.extra


def test_masking_keeps_the_values_of_the_critic_and_the_other_samples(functions):
    values = torch.arange(6.0)
    critic = Given(Scores(rewards=torch.tensor([1.0, 2.0, 3.0]), filter_scores=torch.ones(3), values=values))
    sources = {"critic": (critic, 1.0), "function": (functions["single"], 1.0)}
    scores = result(CombinedScorer(sources, on_error="mask").score(samples("list", "raise", "list")))
    assert torch.equal(scores.values, values)
    assert scores.failures.tolist() == [False, True, False]
    assert scores.rewards[[0, 2]].tolist() == [1.0, 3.0] and scores.rewards[1].isnan()
    assert scores.filter_scores[1].isnan() and not scores.filter_scores[[0, 2]].isnan().any()
    whole = {"critic": (critic, 1.0), "function": (functions["group"], 1.0)}
    scores = result(CombinedScorer(whole, on_error="mask").score(samples("raise", "x", "x")))
    assert all_failed(scores, 3) and torch.equal(scores.values, values)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_failures_of_their_source(functions, wrong):
    values = torch.arange(6.0)
    critic = Given(Scores(rewards=torch.tensor([1.0, wrong, wrong]), values=values))
    sources = {"critic": (critic, 2.0), "function": (functions["group"], 1.0)}
    scores = result(CombinedScorer(sources, on_error="mask").score(samples("list", "x", "x")))
    assert scores.failures.tolist() == [False, True, True]
    assert scores.rewards[0] == 2.0 and scores.rewards[1:].isnan().all()
    assert scores.extra["critic/reward"].nanmean() == 1.0  # an infinity would be the mean of its step
    assert torch.equal(scores.values, values)
    said = rf"^the reward of reward\.critic is {wrong} for 2 of 3 samples, expected finite numbers: .* reward\.on_error=mask to"
    with pytest.raises(RewardError, match=said):
        result(CombinedScorer(sources, on_error="stop").score(samples("list", "x", "x")))


def test_a_sum_that_is_not_finite_is_a_failure_too():
    # 3e38 + 2 * 2e38 is beyond float32's 3.4e38; the second sample's parts cancel out
    sources = {
        "critic": (Given(Scores(rewards=torch.tensor([3e38, 3e38]))), 1.0),
        "server": (Given(Scores(rewards=torch.tensor([2e38, -1.5e38]))), 2.0),
    }
    scores = result(CombinedScorer(sources, on_error="mask").score(samples("x", "x")))
    assert scores.failures.tolist() == [True, False] and scores.rewards[0].isnan() and scores.rewards[1] == 0
    with pytest.raises(
        RewardError, match=r"sum of critic, server is inf for 1 of 2 samples, .*: lower reward\.\*\.weight, or"
    ):
        result(CombinedScorer(sources, on_error="stop").score(samples("x", "x")))


@pytest.mark.parametrize("on_error", ["stop", "mask"])
@pytest.mark.parametrize("error", [KeyError("a bug"), UserError("not of a source")])
def test_errors_that_are_no_source_failures_are_never_masked(on_error, error):
    with pytest.raises(type(error)) as caught:
        result(CombinedScorer({"it": (Given(error), 1.0)}, on_error=on_error).score(samples("x")))
    assert caught.value is error


@pytest.mark.parametrize("on_error", ["stop", "mask"])
def test_a_critic_that_cannot_be_reached_is_never_masked(endpoints, on_error):
    (endpoint,) = endpoints("rewards")
    endpoint.server.shutdown()
    endpoint.server.server_close()
    config = RemoteCriticConfig(port=endpoint.server.server_port, retries=0)
    with RemoteCritic(config) as critic, pytest.raises(ServerUnreachable, match="no critic server answers"):
        result(CombinedScorer({"critic": (RemoteCriticScorer(critic), 1.0)}, on_error=on_error).score(samples("x")))


def test_closing_closes_every_source():
    sources = [Given(Scores(torch.zeros(1))), Given(Scores(torch.zeros(1)))]
    CombinedScorer({"a": (sources[0], 1.0), "b": (sources[1], 1.0)}, on_error="stop").close()
    assert [source.closed for source in sources] == [True, True]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, said",
    [
        (
            RewardConfig(function=FunctionRewardConfig(weight=1.0)),
            "needs the function's file: set reward.function.path",
        ),
        (RewardConfig(function=FunctionRewardConfig(timeout_s=0.0)), "reward.function.timeout_s=0.0 is not possible"),
        (RewardConfig(function=FunctionRewardConfig(processes=0)), "reward.function.processes=0 is not possible"),
        (RewardConfig(endpoints=EndpointRewardConfig(weight=1.0)), "needs addresses: set reward.endpoints.urls"),
        (
            RewardConfig(endpoints=EndpointRewardConfig(urls=["localhost:5000"])),
            "reward.endpoints.urls=localhost:5000 is not possible",
        ),
        (
            RewardConfig(endpoints=EndpointRewardConfig(timeout_s=-1.0)),
            "reward.endpoints.timeout_s=-1.0 is not possible",
        ),
        (RewardConfig(endpoints=EndpointRewardConfig(retries=-1)), "reward.endpoints.retries=-1 is not possible"),
        (
            RewardConfig(endpoints=EndpointRewardConfig(cooldown_s=-1.0)),
            "reward.endpoints.cooldown_s=-1.0 is not possible",
        ),
        (RewardConfig(on_error="ignore"), "reward.on_error=ignore is not possible"),
        (RewardConfig(critic=CriticRewardConfig(math.inf)), "reward.critic.weight=inf is not possible"),
    ],
)
def test_impossible_settings_are_refused(config, said):
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        validate(config, "reward.")


def test_a_run_needs_a_source_of_rewards():
    config = RewardConfig()
    config.critic.weight = 0.0
    with pytest.raises(UserError, match="no reward source is in use"):
        config.require_source()


def test_scores_of_a_wrong_length_are_refused():
    with pytest.raises(RewardError, match="it answered with 1 scores, expected 2 numbers"):
        read_answer({"rewards": [1, 2], "scores": [1]}, 2, "it")
