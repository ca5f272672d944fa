"""What stands for a tensor's bits in the digest of a weight transfer where the tensor is on a GPU."""

import pytest
import torch

from nemo_style_rlhf.generation import transfer
from nemo_style_rlhf.generation.transfer import word_sums


def by_hand(tensor: torch.Tensor) -> list[int]:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8)]
    sums = sum(words), sum(word * position for position, word in enumerate(words))
    return [(each + 2**63) % 2**64 - 2**63 for each in sums]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 1000, 4099])
def test_the_sums_are_those_of_all_words(monkeypatch, dtype, count):
    monkeypatch.setattr(transfer, "SUMMED_BYTES", 1024)
    tensor = torch.randn(count).to(dtype)
    assert word_sums(tensor).tolist() == by_hand(tensor)


def test_a_bit_and_an_exchange_are_noticed_and_the_place_in_memory_is_not():
    weights = torch.randn(64, 33).bfloat16()
    expected = word_sums(weights).tolist()
    assert word_sums(torch.cat([weights.new_zeros(1), weights.flatten()])[1:].view(64, 33)).tolist() == expected
    assert word_sums(weights.T.contiguous().T).tolist() == expected
    for row in (0, 31, 63):
        stale = weights.clone()
        stale.view(torch.int16)[row, 7] ^= 1
        assert word_sums(stale).tolist() != expected
    assert word_sums(weights.flip(0)).tolist() != expected
