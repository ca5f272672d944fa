"""Checks of a supervised stage's rows."""

from collections.abc import Callable, Sequence
from typing import Any

from nemo_style_rlhf.data.encoding import Encoder
from nemo_style_rlhf.data.preview import Reader, count_rows, first_rows
from nemo_style_rlhf.data.records import Record
from nemo_style_rlhf.data.supervised import pair_reader, sft_reader, unpaired_reader
from nemo_style_rlhf.data.template_files import check_template
from nemo_style_rlhf.schema.model_files import rows_of
from nemo_style_rlhf.schema.supervised import (
    PairDataConfig,
    SFTDataConfig,
    SupervisedConfig,
    SupervisedDataConfig,
    UnpairedDataConfig,
)


def check_rows(data: SupervisedDataConfig) -> None:
    """Check what needs no tokenizer."""
    for source in _sources(data):
        count_rows(source, _reader(data))


def check_tokens(config: SupervisedConfig) -> None:
    """Check the first rows with the tokenizer; runs without torch."""
    from nemo_style_rlhf.models.tokenizer import load_tokenizer

    data: SupervisedDataConfig = config.data  # type: ignore[attr-defined]
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    if isinstance(data, PairDataConfig):
        check_template(config.model.path, data, tokenizer)
    for source in _sources(data):
        first_rows(
            source,
            _reader(data),
            Encoder(tokenizer, chat_template=data.chat_template, today=data.today, rows=rows_of(tokenizer)),
        )


def _sources(data: SupervisedDataConfig) -> list[Any]:
    return [*data.training_sources, *([data.val_path] if data.val_path else [])]


def _reader(data: SupervisedDataConfig) -> Reader[Any]:
    def reader(records: Sequence[Record], encoder: Encoder) -> Callable[[Record], Any]:
        if isinstance(data, UnpairedDataConfig):
            return unpaired_reader(records, data, encoder)
        if isinstance(data, PairDataConfig):
            return pair_reader(records, data, encoder)
        assert isinstance(data, SFTDataConfig)
        return sft_reader(records, data, encoder)

    return reader
