"""Sampling settings that a data row or a caller of an engine brings: each possible one is kept, each other one refused."""

import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.generation import SamplingOverrides
from tests.support.sampling_settings import IMPOSSIBLE

POSSIBLE = [
    {},
    {"temperature": None, "stop": None},
    {"temperature": 1e-5, "top_p": 1, "top_k": -1, "max_length": 1, "min_length": 0, "stop": [], "stop_token_ids": []},
    {"temperature": 2, "top_p": 1e-9, "top_k": 2**40, "stop": ["ä", "\ud800"], "stop_token_ids": [0, 2**40]},
]


@pytest.mark.parametrize("given", POSSIBLE)
def test_possible_settings_are_kept(given: dict[str, object]) -> None:
    kept = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    assert SamplingOverrides.parse(given, "line 1") == SamplingOverrides(**kept)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values])
def test_impossible_settings_are_refused_in_a_short_sentence(name: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^line 1: {name}=.* is not possible: expected a ") as refused:
        SamplingOverrides.parse({name: value}, "line 1")
    assert len(str(refused.value)) < 250


def test_the_sentence_about_an_unknown_setting_is_short() -> None:
    with pytest.raises(UserError, match=r"expected some of max_length, .*, top_p$") as refused:
        SamplingOverrides.parse({"beams": "x" * 100_000}, "line 1")
    assert len(str(refused.value)) < 400
