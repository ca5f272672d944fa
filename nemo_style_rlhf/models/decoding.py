"""Decodes tokens in a process of its own without transformers, whose import takes seconds of CPU time. Imports no torch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]


def decoder_loader(tokenizer: "PreTrainedTokenizerBase", path: str, *, trust_remote_code: bool) -> Callable[[], Decode]:
    """A picklable function that another process calls for the equivalent of ``tokenizer.decode``.

    Args:
        path: of the tokenizer. It is loaded again, with transformers, if it does more than its `tokenizers` backend.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )
    if plain:
        return partial(_backend_decoder, tokenizer.backend_tokenizer.to_str())
    return partial(_whole_decoder, path, trust_remote_code)


def backend(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The tokenizer in the format of the `tokenizers` library; None if it has another backend."""
    from transformers import PreTrainedTokenizerFast

    return tokenizer.backend_tokenizer.to_str() if isinstance(tokenizer, PreTrainedTokenizerFast) else None


def _backend_decoder(backend: str) -> Decode:
    from tokenizers import Tokenizer

    return partial(Tokenizer.from_str(backend).decode, skip_special_tokens=False)


def _whole_decoder(path: str, trust_remote_code: bool) -> Decode:
    from transformers import AutoTokenizer

    decode: Decode = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code).decode
    return decode
