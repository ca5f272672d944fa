"""A reward model is trained to read the token at which a sample of the policy ends."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_style_rlhf.data.records import Record
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.data.supervised import pair_reader, sft_reader
from nemo_style_rlhf.data.template_files import TEMPLATE_FILE, write_template
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.schema.model_files import stop_ids
from nemo_style_rlhf.schema.supervised import PreferenceDataConfig, SFTDataConfig
from tests.unit.agents.chat_templates import CHATML, REAL, encoder

QUESTION = [{"role": "user", "content": "two plus two"}]
PUBLISHED = {
    "gemma": ("<eos>", ["<eos>", "<end_of_turn>"], "<end_of_turn>"),
    "gemma3": ("<eos>", ["<eos>", "<end_of_turn>"], "<end_of_turn>"),
    "phi3": ("<|endoftext|>", ["<|endoftext|>", "<|assistant|>", "<|end|>"], "<|end|>"),
    "qwen2_5": ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
    "llama3": ("<|eot_id|>", ["<|end_of_text|>", "<|eot_id|>"], "<|eot_id|>"),
}
"""By chat template: EOS of the tokenizer, those of generation_config.json, and the token with which a turn ends."""


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def saved(folder: Path, template: str, eos: str, stops: list[str]):
    """The tokenizer of a folder as it is published."""
    tokenizer = encoder(template).tokenizer
    tokenizer.add_special_tokens({"eos_token": eos, "pad_token": eos, "additional_special_tokens": stops})
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(stops)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.skipif(not REAL, reason="the chat templates of public models do not lie beside this checkout")
@pytest.mark.parametrize("family", PUBLISHED)
def test_training_ends_where_samples_end(family: str, tmp_path: Path) -> None:
    """Pairs, SFT, and the reward server's own text."""
    eos, stops, ends = PUBLISHED[family]
    tokenizer = saved(tmp_path, REAL[family], eos, stops)
    reader = type(encoder(CHATML))(tokenizer)
    row = {"prompt": QUESTION, "chosen": said("four"), "rejected": said("five")}
    pair = pair_reader([], PreferenceDataConfig(train_path="x"), reader)(Record(0, "line 1", row))
    assert tokenizer.convert_ids_to_tokens(pair.chosen[-1]) == ends
    assert tokenizer.decode(pair.chosen[pair.prompt_length : -1]).strip() == "four"
    (example,) = sft_reader((), SFTDataConfig(train_path="x"), reader)(
        Record(0, "line 1", {"messages": [*QUESTION, *said("four")]})
    )
    assert example.token_ids == pair.chosen
    write_template(tmp_path, None, tokenizer, append_eos=True)
    (tmp_path / "generation_config.json").unlink()  # which no export of a classifier has
    text = RewardText(str(tmp_path), AutoTokenizer.from_pretrained(tmp_path), append_eos=None)
    assert text.token_ids(Chat(QUESTION), "four") == pair.chosen


def test_a_model_trained_before_the_note_told_its_stop_tokens_is_read_as_it_was_trained(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, CHATML, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"])
    write_template(tmp_path, None, tokenizer, append_eos=True)
    note = json.loads((tmp_path / TEMPLATE_FILE).read_text())
    del note["stop_token_ids"]
    (tmp_path / TEMPLATE_FILE).write_text(json.dumps(note))
    ids = RewardText(str(tmp_path), tokenizer, append_eos=None).token_ids(Chat(QUESTION), "four")
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == "<|endoftext|>"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"eos_token_id": null}', '{"eos_token_id": "x"}'])
def test_without_a_generation_config_the_tokenizers_token_is_the_only_one(content: str | None, tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, CHATML, "<|im_end|>", ["<|im_end|>"])
    (tmp_path / "generation_config.json").unlink()
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert stop_ids(tokenizer) == {tokenizer.eos_token_id}
