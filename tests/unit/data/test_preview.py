"""The first rows are read by the code that reads all of them, and decide only what they can."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from datasets import Dataset

from nemo_style_rlhf.data import sources
from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.preview import FIRST_ROWS, Reader, count_rows, first_rows
from nemo_style_rlhf.data.prompts import prompt_reader
from nemo_style_rlhf.data.records import Record
from nemo_style_rlhf.data.sources import read_head, read_records
from nemo_style_rlhf.data.supervised import pair_reader
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.data import PromptRowsConfig
from nemo_style_rlhf.schema.supervised import PairDataConfig


def write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(**changes: object) -> Reader:
    config = PromptRowsConfig(**changes)
    return lambda _, encoder: prompt_reader(config, encoder)


USABLE, KEYLESS = {"prompt": "a b"}, {"question": "a b"}


def test_rows_are_counted_up_to_what_a_tokenizer_would_say(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [KEYLESS, USABLE, {"prompt": 3}, {"prompt": ""}, USABLE])
    assert count_rows(path, prompts(max_prompt_length=1)) == 3
    assert count_rows([path, path], prompts()) == 6
    turns = {"messages": [{"role": "user", "content": "a b"}]}
    path = write(tmp_path / "turns.jsonl", [turns, KEYLESS, turns])
    assert count_rows(path, prompts(format="messages", prompt_key="messages")) == 2


@pytest.mark.parametrize("extra", [0, 1, FIRST_ROWS])
def test_a_fault_of_all_rows_is_found_however_many_there_are(tmp_path: Path, extra: int) -> None:
    path = write(tmp_path / "rows.jsonl", [KEYLESS] * (FIRST_ROWS + extra))
    with pytest.raises(UserError, match=r"line 1 has no key 'prompt' \(the keys there are: question\)"):
        count_rows(path, prompts())


def test_rows_beyond_the_first_are_read_where_those_do_not_decide(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*[KEYLESS] * FIRST_ROWS, USABLE, USABLE])
    assert count_rows(path, prompts()) == 2
    path = write(tmp_path / "many.jsonl", [USABLE] * (FIRST_ROWS + 5))
    assert count_rows(path, prompts()) == FIRST_ROWS
    assert count_rows(path, prompts(), enough=FIRST_ROWS + 2) == FIRST_ROWS + 2
    assert count_rows(path, prompts(), enough=FIRST_ROWS + 9) == FIRST_ROWS + 5


def test_pairs_without_prompts_are_read_as_most_rows_of_the_whole_file_say(tmp_path: Path) -> None:
    """Rows lack the prompt that a later one has, so that all but that one are faulty."""
    pair = {"chosen": "a b c", "rejected": "a b d"}
    path = write(tmp_path / "rows.jsonl", [*[pair] * FIRST_ROWS, {**pair, "prompt": "a"}])
    config = PairDataConfig(train_path=path)
    assert count_rows(path, lambda records, encoder: pair_reader(records, config, encoder)) == FIRST_ROWS
    assert count_rows(path, lambda records, encoder: pair_reader(records, config, encoder), enough=9999) == 1


def test_the_first_rows_have_the_tokens_of_training(tmp_path: Path, tokenizer) -> None:
    rows = [{"prompt": "a" * (1 + number % 7)} for number in range(FIRST_ROWS + 3)]
    encoder = Encoder(tokenizer)
    found, whole = first_rows(write(tmp_path / "rows.jsonl", rows), prompts(max_prompt_length=5), encoder)
    read = prompt_reader(PromptRowsConfig(), encoder)
    records = [Record(index, "", row) for index, row in enumerate(rows[:FIRST_ROWS]) if len(row["prompt"]) < 5]
    assert not whole
    assert [prompt.token_ids for prompt, _ in found] == [read(record)[0].token_ids for record in records]


def test_too_long_rows_are_an_error_only_if_there_are_no_others(tmp_path: Path, tokenizer) -> None:
    long = [{"prompt": "abcdef"}] * FIRST_ROWS
    with pytest.raises(
        UserError, match=r"all 1000 rows were dropped \(1000 longer than 3 tokens\): raise data\.max_prompt"
    ):
        first_rows(write(tmp_path / "rows.jsonl", long), prompts(max_prompt_length=3), Encoder(tokenizer))
    more = write(tmp_path / "more.jsonl", [*long, {"prompt": "a"}])
    assert first_rows(more, prompts(max_prompt_length=3), Encoder(tokenizer)) == ([], False)


def test_the_head_of_a_file_holds_what_all_of_it_holds(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": str(number)}], "label": number / 2} for number in range(5)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    write(tmp_path / "rows.jsonl", rows)
    for name in ("rows.parquet", "rows.json", "rows.jsonl", "r*.json*"):
        records = list(read_records(str(tmp_path / name)))
        assert read_head(str(tmp_path / name), None) == (records, True)
        assert read_head(str(tmp_path / name), len(records)) == (records, True)
        assert read_head(str(tmp_path / name), 3) == (records[:3], False)


def test_what_takes_long_is_left_to_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dataset.from_list([KEYLESS]).save_to_disk(tmp_path / "saved")
    (tmp_path / "broken.parquet").write_text("no rows")
    (tmp_path / "array.json").write_text(json.dumps([KEYLESS] * 9))
    monkeypatch.setattr(sources, "LARGE_ARRAY", 99)
    for name in ("owner/name", *(str(tmp_path / name) for name in ("saved", "broken.parquet", "array.json"))):
        assert read_head(name, 3) == ([], False)
        assert count_rows(name, prompts(), enough=7) == 7
