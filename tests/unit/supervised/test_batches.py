"""Micro-batches: the mask is aligned to actions, and how a step is split changes neither its rows nor its loss."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from nemo_style_rlhf.data.examples import PreferencePair, SFTExample
from nemo_style_rlhf.models.scalar import ScalarModel
from nemo_style_rlhf.schema.supervised import SupervisedEngineConfig
from nemo_style_rlhf.supervised.batches import (
    Positions,
    TrainingBatches,
    ValidationBatches,
    collate_pairs,
    collate_sft,
    parts_within,
    split,
)
from nemo_style_rlhf.supervised.reward_model import RewardModelModule
from nemo_style_rlhf.supervised.sft import SFTModule

TINY = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
rows = st.lists(
    st.tuples(st.lists(st.integers(1, 12), min_size=2, max_size=9), st.integers(0, 8)), min_size=1, max_size=12
).map(lambda drawn: [SFTExample(ids, min(prompt, len(ids) - 1)) for ids, prompt in drawn])


def test_the_mask_stands_one_before_each_learned_token():
    batch = collate_sft([SFTExample([5, 6, 7, 8], 2), SFTExample([5, 6, 7], 0)], [SFTExample([5, 6], 1)] * 3, 0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [5, 6, 7, 0]]
    # Row 0 learns tokens 2 and 3; row 1, plain text, learns all but its first.
    assert batch.action_mask.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    assert batch.step_count == 3


@given(rows, st.integers(0, 99), st.sampled_from([1, 2, 4]))
def test_micro_batches_of_a_step_hold_its_rows_once(examples, seed, micro):
    whole = TrainingBatches(examples, collate_sft, 0, batch_size=4, micro_batches=1, steps=3, seed=seed)
    parts = TrainingBatches(examples, collate_sft, 0, batch_size=4, micro_batches=4 // micro, steps=3, seed=seed)
    assert len(parts) == 3 * 4 // micro
    for step in range(3):
        pieces = [parts[step * parts.micro_batches + part] for part in range(parts.micro_batches)]
        assert sum(int(piece.action_mask.sum()) for piece in pieces) == whole[step].step_count
        assert {piece.step_count for piece in pieces} == {whole[step].step_count}


def test_the_loss_of_a_step_does_not_depend_on_its_split():
    torch.manual_seed(0)
    examples = [SFTExample(torch.randint(1, 13, (length,)).tolist(), length // 3) for length in range(2, 10)]
    module = SFTModule(LlamaForCausalLM(LlamaConfig(**TINY)), SupervisedEngineConfig(), 1, compile_backbone=False)
    losses = []
    for micro in (8, 2):
        batches = TrainingBatches(examples, collate_sft, 0, batch_size=8, micro_batches=8 // micro, steps=1, seed=3)
        losses.append(sum(module.losses(batches[k])[0] / batches[k].step_count for k in range(len(batches))))
    torch.testing.assert_close(losses[0], losses[1])


def test_sft_loss_is_the_cross_entropy_transformers_computes():
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(**TINY))
    example = SFTExample([3, 4, 5, 6, 7], 2)
    total, count, _ = SFTModule(hf, SupervisedEngineConfig(), 1, False).losses(collate_sft([example], [example], 0))
    labels = torch.tensor([[-100, -100, 5, 6, 7]])
    expected = hf(input_ids=torch.tensor([example.token_ids]), labels=labels).loss
    torch.testing.assert_close(total / count, expected)


@pytest.mark.parametrize("pad_token_id", [0, 12])  # 12 also ends the texts, as where pad is EOS
def test_reward_model_scores_are_those_transformers_pools(pad_token_id):
    torch.manual_seed(0)
    hf = LlamaForSequenceClassification(LlamaConfig(**{**TINY, "pad_token_id": pad_token_id}, num_labels=1)).eval()
    pair = [PreferencePair([1, 2, 3, 12], [1, 4, 12]), PreferencePair([5, 6, 12], [7, 8, 9, 10, 12])]
    batch = collate_pairs(pair, pair, pad_token_id)
    scores = hf(input_ids=batch.input_ids, attention_mask=(batch.input_ids != pad_token_id).long()).logits[:, 0]
    module = RewardModelModule(ScalarModel(hf), SupervisedEngineConfig(), 1, "sigmoid")
    total, count, means = module.losses(batch)
    expected = -torch.nn.functional.logsigmoid(scores[:2] - scores[2:]).sum()
    torch.testing.assert_close(total, expected)
    assert count == 2 and means["pair_accuracy"] == (scores[:2] > scores[2:]).sum()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200), st.booleans())
def test_groups_fit_the_token_budget(lengths, budget, packed):
    parts = parts_within(lengths, budget, packed=packed)
    groups = split(lengths, parts, packed=packed)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        chosen = [lengths[row] for row in group]
        assert len(group) == 1 or (sum(chosen) if packed else len(chosen) * max(chosen)) <= budget


def test_packed_groups_are_balanced():
    assert split([9, 1, 5, 5, 4, 2], 2, packed=True) == [[0, 4], [2, 3, 5, 1]]
    assert split([9, 1, 5, 5, 4, 2], 2, packed=False) == [[0, 2, 3], [4, 5, 1]]
    assert parts_within([9, 1, 5, 5, 4, 2], 13, packed=True) == 2


def test_positions_of_ranks_and_after_a_resume():
    assert list(Positions(6)) == [0, 1, 2, 3, 4, 5]
    second = Positions(6, rank=1, stride=2, done=1)
    assert list(second) == [3, 5] and len(second) == 3


@given(rows, st.integers(1, 5), st.integers(1, 3))
def test_validation_sees_every_row_once(examples, batch_size, ranks):
    ranks = min(ranks, len(examples))
    batches = ValidationBatches(examples, collate_sft, 0, batch_size=batch_size, ranks=ranks)
    assert len(batches) % ranks == 0 and all(batches.rows_of(k) for k in range(len(batches)))
    counted = sum(int(batches[k].action_mask.sum()) for k in range(len(batches)))
    assert counted == sum(len(example) - max(example.prompt_length, 1) for example in examples)
