"""Sources of rewards see what was asked, and everything that the policy said."""

from dataclasses import replace

import torch

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.rollout.prefetched import pack_rollouts, unpack_rollouts
from nemo_style_rlhf.rollout.producer import scoring_sample
from nemo_style_rlhf.rollout.types import Rollout, Turn
from nemo_style_rlhf.schema.chat import Chat
from tests.support.rollouts import rollout


def decode(prompt: list[int], response: list[int]) -> str:
    return " ".join(map(str, response))


def branch(number: int, *turns: tuple[int, int], **fields: object) -> Rollout:
    plain = rollout(2, 8)
    prompt = Prompt(0, [1, 2], "the row", label="7", chat=Chat([{"role": "user", "content": "the row"}]))
    tokens = torch.arange(10) + 100 * number
    return replace(
        plain, prompt=prompt, tokens=tokens, branch=number, turns=tuple(Turn(*turn, "stop") for turn in turns), **fields
    )  # type: ignore[arg-type]


def told(sample) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
    return [tuple(message) for message in sample.messages]


def test_of_an_episode_that_a_template_rewrites_all_turns_are_told() -> None:
    """Its rows follow one another; the tokens are those of the last, which has all of the conversation."""
    rows = [branch(0, (2, 4), (6, 8)), branch(1, (7, 9), observed="Go on.")]
    sample = scoring_sample(rows, decode)
    assert told(sample) == [
        ("prompt", "the row"), ("response", "2 3"), ("environment", "4 5"), ("response", "6 7"),
        ("environment", "Go on."), ("response", "107 108"),
    ]  # fmt: skip
    assert sample.tokens.tolist() == rows[1].tokens.tolist() and sample.label == "7"
    assert sample.chat is rows[0].prompt.chat


def test_what_a_program_asked_stands_in_place_of_the_row() -> None:
    asked = Chat([{"role": "user", "content": "another"}])
    row = branch(3, (4, 6), began_with="user: another", asked=asked)
    sample = scoring_sample([row], decode)
    assert told(sample) == [("prompt", "user: another"), ("response", "304 305")] and sample.chat == asked
    assert scoring_sample([replace(row, asked=None)], decode).chat is None  # a text is no conversation


def test_it_travels_between_ranks_and_into_checkpoints() -> None:
    rows = [branch(0, (2, 4)), branch(1, (4, 6), observed="x"), branch(2, (4, 6), began_with="y", asked=Chat([], []))]
    rows[2].asked = Chat([{"role": "user", "content": "é"}], today="2026-01-01")
    found = unpack_rollouts(pack_rollouts(rows), {0: rows[0].prompt})
    for name in ("observed", "asked", "began_with", "branch"):
        assert [getattr(each, name) for each in found] == [getattr(each, name) for each in rows]
