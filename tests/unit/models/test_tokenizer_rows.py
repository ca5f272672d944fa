"""Two files of a checkpoint that disagree about ids are one sentence before anything is loaded."""

import json
from pathlib import Path

import pytest

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.tokenizer import load_tokenizer
from nemo_style_rlhf.schema.model_files import rows_of
from tests.unit.agents.chat_templates import CHATML, encoder


def saved(folder: Path, *, missing: int = 0, extra: str | None = None, **config: object) -> Path:
    """A tokenizer, and a config.json with as many rows but for the ``missing`` last ones."""
    tokenizer = encoder(CHATML).tokenizer
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    if extra is not None:
        tokenizer.add_special_tokens({"pad_token": extra})
    tokenizer.save_pretrained(folder)
    rows = len(tokenizer) - missing
    values = {
        "model_type": "llama",
        "vocab_size": rows,
        **{name: rows for name, value in config.items() if value == "rows"},
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_padding_without_a_row_gives_way_and_a_text_that_has_the_token_is_refused(tmp_path: Path) -> None:
    """A token that no row of the data uses is no reason to refuse a model."""
    tokenizer = load_tokenizer(str(saved(tmp_path, missing=1, extra="[PAD]")))
    assert tokenizer.pad_token == "<|im_end|>"
    reader = Encoder(tokenizer, rows=rows_of(tokenizer))
    assert reader.prompt("a cat") and reader.rendered("a cat")
    for read in (reader.prompt, reader.rendered):
        with pytest.raises(UserError, match=r"'\[PAD\]' \(id \d+\) has no row .* take the tokenizer that belongs to"):
            read("a [PAD] cat")


def test_a_model_whose_own_padding_has_no_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pad_token_id=\d+ in its config.json has no row in the embedding of vocab"):
        load_tokenizer(str(saved(tmp_path, pad_token_id="rows")))


def test_a_tokenizer_that_fits_is_left_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(saved(tmp_path, extra="[PAD]")))
    assert tokenizer.pad_token == "[PAD]" and Encoder(tokenizer, rows=rows_of(tokenizer)).prompt("a [PAD] cat")
