"""A reward model reads in serving what it read in training."""

import json
from pathlib import Path

import pytest

from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.data.supervised import load_pairs
from nemo_style_rlhf.data.templates import write_template
from nemo_style_rlhf.schema.supervised import PreferenceDataConfig
from tests.unit.data.conftest import letter_tokenizer


@pytest.mark.parametrize("single", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("template", [None, "q{prompt}r"])
@pytest.mark.parametrize("append_eos", [True, False])
def test_serving_forms_the_sequences_of_training(
    tmp_path: Path, single: str | None, template: str | None, append_eos: bool
) -> None:
    tokenizer = letter_tokenizer(single)
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "c"}, {"prompt": "{b}", "chosen": "d ", "rejected": "</s>"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = PreferenceDataConfig(train_path=str(path), prompt_template=template, append_eos=append_eos)
    pairs, _ = load_pairs(str(path), config, tokenizer)
    write_template(tmp_path, template, tokenizer, append_eos=append_eos)
    text = RewardText(str(tmp_path), tokenizer, append_eos=None)
    assert len(pairs) == len(rows)
    for row, pair in zip(rows, pairs, strict=True):
        assert text.token_ids(row["prompt"], row["chosen"]) == pair.chosen
        assert text.token_ids(row["prompt"], row["rejected"]) == pair.rejected


def test_without_a_note_or_an_end_of_text_token_the_texts_stay_as_they_are(tmp_path: Path) -> None:
    text = RewardText(str(tmp_path), letter_tokenizer(None, eos=None), append_eos=None)
    assert text.token_ids("ab", "c") == [2, 3, 4]
