"""Texts of tokens together are the whole text, whatever a policy samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nemo_style_rlhf.watch.sample_tokens import sample_json
from nemo_style_rlhf.watch.tokens import BROKEN, special_tokens, texts_of
from tests.support.rollout_files import END, byte_tokenizer, sample_row

TOKENIZER = byte_tokenizer()
FIRST_BYTE = 3
"""Id of byte 0."""


def byte_fallback() -> Tokenizer:
    """As Llama 2 writes it: a space is part of its word, and bytes are tokens where no word fits."""
    pieces = [("<unk>", 0.0), ("▁the", -1.0), ("▁cat", -1.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@given(st.text(max_size=40))
def test_the_texts_of_a_texts_tokens_join_to_it(text: str) -> None:
    texts = texts_of(TOKENIZER, TOKENIZER.encode(text).ids)
    assert "".join(each or "" for each in texts) == text
    assert len(texts) == len(text.encode())
    assert [each for each in texts if each is not None] == list(text)  # a character stands where its last byte does


@given(st.lists(st.integers(0, END), max_size=60))
def test_random_bytes_keep_every_character_that_they_hold(ids: list[int]) -> None:
    texts = texts_of(TOKENIZER, ids)
    whole = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert len(texts) == len(ids)
    assert [each for each in "".join(text or "" for text in texts) if each != BROKEN] == [
        each for each in whole if each != BROKEN
    ]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 1], ["the", " cat", " the"]),
        ([1, FIRST_BYTE + 0xC3, FIRST_BYTE + 0xA9, 2], ["the", None, "é", " cat"]),
        ([1, FIRST_BYTE + 0xC3], ["the", BROKEN]),
        ([1, *[FIRST_BYTE + 0x9F] * 4, 2], ["the", *[BROKEN] * 4, " cat"]),
        ([9999, 1], ["<9999>", "the"]),
    ],
)
def test_spaces_and_bytes_of_a_sentencepiece_tokenizer(ids: list[int], expected: list[str | None]) -> None:
    assert texts_of(byte_fallback(), ids) == expected


def test_a_part_of_the_tokens_reads_as_it_does_in_the_whole() -> None:
    row = sample_row(1, 0, "é", "añ👩x")
    whole = sample_json(row, TOKENIZER, 0, 100)
    for first in range(len(row["tokens"])):
        part = sample_json(row, TOKENIZER, first, 3)
        assert part["texts"] == whole["texts"][first : first + 3]
        assert part["numbers"]["kl"] == whole["numbers"]["kl"][first : first + 3]
    assert whole["texts"][-1] == "<eos>" and whole["special"] == [False] * (whole["total"] - 1) + [True]
    assert special_tokens(TOKENIZER) == {END}


def test_numbers_stand_at_their_tokens_and_only_where_the_policy_learned() -> None:
    shown = sample_json(sample_row(1, 0, "pq", "abc", mask=[True, False, True, True]), None, 0, 100)
    assert shown["texts"] is None
    assert shown["numbers"]["kl"] == [None, None, 0.0, None, 0.02, 0.03]
    assert shown["numbers"]["sampler_gap"] == [None, None, 0.25, None, 0.25, 0.25]
    assert shown["mask"] == [False, False, True, False, True, True]
    assert set(shown["numbers"]) == {"kl", "advantages", "logprobs", "sampler_logprobs", "sampler_gap"}
