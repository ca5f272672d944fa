"""The reward sources that read only texts. Models are connected in ppo/rewards.py; interface.py is the contract."""

from collections.abc import Collection
from pathlib import Path

from nemo_style_rlhf.schema.reward import RewardConfig
from nemo_style_rlhf.scoring.endpoints import EndpointScorer
from nemo_style_rlhf.scoring.function import FunctionScorer
from nemo_style_rlhf.scoring.interface import Scorer
from nemo_style_rlhf.scoring.judge import JudgeScorer


def text_sources(
    reward: RewardConfig, columns: Collection[str], *, verdicts: Path, rank: int = 0
) -> dict[str, tuple[Scorer, float]]:
    """Name to (source, weight) of the function, the endpoints and the judge, for those in use.

    Args:
        columns: names of the rows' other fields that a function may ask for, the label's column among them.
        verdicts: folder of the judge's verdicts, unless the configuration names one.

    Raises:
        UserError: a source cannot be used as it is configured.
    """
    sources: dict[str, tuple[Scorer, float]] = {}
    if reward.function.weight != 0:
        sources["function"] = FunctionScorer(reward.function, columns), reward.function.weight
    if reward.endpoints.weight != 0:
        sources["endpoints"] = EndpointScorer(reward.endpoints, rank=rank), reward.endpoints.weight
    if reward.judge.weight != 0:
        sources["judge"] = JudgeScorer(reward.judge, verdicts, rank=rank), reward.judge.weight
    return sources
