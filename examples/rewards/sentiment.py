"""Happier responses: the sum of a sentiment lexicon's values over their words, as examples/stories measures it.

    SENTIMENT_LEXICON=vader_lexicon.txt .venv-actor/bin/python trainers/train_ppo_actor.py algorithm=grpo reward=function \
        reward.function.path=examples/rewards/sentiment.py data.train_path=$PROMPTS model.path=$POLICY \
        run.output_dir=outputs/sentiment

A line of the lexicon is `word<tab>value<tab>...`, like VADER's (github.com/cjhutto/vaderSentiment, vader_lexicon.txt).
"""

import functools
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "stories"))

from data import load_lexicon, valence


def reward_func(queries: list[str], prompts: list[str], labels: list[str | None]) -> list[float]:
    return [valence(query[len(prompt) :], lexicon()) for query, prompt in zip(queries, prompts, strict=True)]


@functools.cache
def lexicon() -> dict[str, float]:
    path = os.environ.get("SENTIMENT_LEXICON", "vader_lexicon.txt")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no lexicon {path}: set SENTIMENT_LEXICON to its path")
    return load_lexicon(Path(path))
