"""DPO and KTO modules: which tokens count, what the reference is, and that the split of a step changes nothing."""

import copy
from functools import partial

import hypothesis.strategies as st
import pytest
import pytorch_lightning as pl
import torch
from hypothesis import assume, given
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.algorithms.preference_loss import dpo_loss, kto_loss
from nemo_style_rlhf.data.examples import PreferencePair, UnpairedExample
from nemo_style_rlhf.schema.supervised import DPOConfig, FitConfig, KTOConfig
from nemo_style_rlhf.supervised.batches import TrainingBatches, ValidationBatches
from nemo_style_rlhf.supervised.dpo import DPOModule
from nemo_style_rlhf.supervised.kto import KTOModule, balance, mean_kl
from nemo_style_rlhf.supervised.preference_batches import MismatchedPairs, collate_dpo, collate_kto, mismatched

MAX_LENGTH = 12
collate = partial(collate_kto, fit=FitConfig(), max_length=MAX_LENGTH)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=0,
        )
    ).double()  # fmt: skip


def moved(module, seed: int = 1):
    """The module after some training: policy and reference differ."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return module


def tokens(count: int) -> list[int]:
    return torch.randint(1, 13, (count,)).tolist()


def some_pairs() -> list[PreferencePair]:
    torch.manual_seed(2)
    pairs = []
    for size in range(1, 9):
        prompt = tokens(size % 3 + 1)
        pairs.append(PreferencePair(prompt + tokens(size), prompt + tokens(9 - size), prompt_length=len(prompt)))
    return pairs


def some_judged() -> list[UnpairedExample]:
    torch.manual_seed(3)
    return [UnpairedExample(tokens(size % 3 + 1 + size), size % 3 + 1, size % 3 != 0) for size in range(1, 9)]


def response_logprob(hf, token_ids: list[int], prompt_length: int) -> float:
    """Token by token from transformers' logits."""
    with torch.no_grad():
        logprobs = hf(input_ids=torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return sum(float(logprobs[t - 1, token_ids[t]]) for t in range(prompt_length, len(token_ids)))


@pytest.mark.parametrize("loss, nll_weight", [("sigmoid", 0.0), ("sigmoid", 0.5), ("ipo", 0.0)])
def test_dpo_is_the_loss_of_transformers_log_probabilities(loss, nll_weight):
    start, pairs = model(), some_pairs()
    module = moved(DPOModule(model(), DPOConfig(beta=0.3, loss=loss, nll_weight=nll_weight), 1))
    columns, nll = [], 0.0
    for hf in (module.policy.hf, start):
        for side in ("chosen", "rejected"):
            sums = [response_logprob(hf, getattr(pair, side), pair.prompt_length) for pair in pairs]
            means = [total / (len(getattr(pair, side)) - pair.prompt_length) for total, pair in zip(sums, pairs)]
            columns.append(torch.tensor(means if loss == "ipo" else sums))
            nll = nll or -sum(means)  # of the first column: the policy's chosen responses
    expected = dpo_loss(*columns, beta=0.3, kind=loss) * len(pairs) + nll_weight * nll
    total, count, metrics = module.losses(collate_dpo(pairs, pairs, 0))
    assert count == len(pairs) and total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["nll"].item() == pytest.approx(nll, rel=1e-5)
    if loss == "sigmoid":
        rewards = 0.3 * (columns[0] - columns[2])
        assert metrics["rewards/chosen"].item() == pytest.approx(rewards.sum().item(), rel=1e-4)


def test_kto_is_the_loss_of_transformers_log_probabilities():
    start, rows = model(), some_judged()
    module = moved(KTOModule(model(), KTOConfig(beta=0.3, desirable_weight=2.0), 1))

    def ratios(examples):
        ours = (response_logprob(module.policy.hf, row.token_ids, row.prompt_length) for row in examples)
        theirs = (response_logprob(start, row.token_ids, row.prompt_length) for row in examples)
        return torch.tensor([a - b for a, b in zip(ours, theirs)])

    kl = ratios(mismatched(rows, MAX_LENGTH)).mean()
    labels = torch.tensor([row.desirable for row in rows])
    of_rows = ratios(rows)
    expected = kto_loss(of_rows, torch.zeros(8), kl, labels, beta=0.3, desirable_weight=2.0) * 8
    total, count, metrics = module.losses(collate(rows, rows, 0))
    assert count == 8 and total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["kl"].item() == pytest.approx(8 * max(kl.item(), 0), rel=1e-5)
    desirable, number = metrics["rewards/desirable"]
    assert number == 6 and desirable.item() == pytest.approx(0.3 * of_rows[labels].sum().item(), rel=1e-4)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_the_split_of_a_step_does_not_change_the_gradient_of_dpo(loss):
    module = moved(DPOModule(model(), DPOConfig(loss=loss, nll_weight=0.3), 1))
    assert_same_gradients([gradient(module, some_pairs(), collate_dpo, parts) for parts in (1, 2, 8)])


def test_the_split_of_a_step_does_not_change_the_gradient_of_kto():
    """Also with one row per micro-batch, which alone has nothing to mismatch, and where the KL is above 0."""
    module = moved(KTOModule(model(), KTOConfig(beta=0.5), 1), seed=4)
    rows = some_judged()
    assert mean_kl(module.sum_ratios(collate(rows, rows, 0).mismatched)) > 0
    assert_same_gradients([gradient(module, rows, collate, parts) for parts in (1, 2, 8)])


def test_validation_does_not_depend_on_the_size_of_its_batches():
    """Although they are sorted by length, with which what is desirable may go; one row alone is a batch like any other."""
    module, rows = moved(KTOModule(model(), KTOConfig(beta=0.5), 1), seed=4), some_judged()
    kl = mean_kl(module.sum_ratios(collate(rows, rows, 0).mismatched)).item()
    for batch_size in (8, 3, 1):
        batches = ValidationBatches(rows, collate, 0, batch_size=batch_size)
        (metrics,) = trainer().validate(module, DataLoader(batches, batch_size=None), verbose=False)
        assert metrics["val/kl"] == pytest.approx(kl, rel=1e-5)
        loss = module.losses(collate(rows, rows, 0))[0].item() / len(rows)
        assert metrics["val/loss"] == pytest.approx(loss, rel=1e-5)


def trainer(**settings) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip


class Gradients(pl.Callback):
    """Of the optimizer step, before it is clipped."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.caught = [weight.grad.clone() for weight in pl_module.parameters()]


def gradient(module, rows, collate_rows, parts: int) -> list[torch.Tensor]:
    """Of one optimizer step by Lightning; the module stays as it is."""
    batches = TrainingBatches(rows, collate_rows, 0, batch_size=len(rows), micro_batches=parts, steps=1, seed=3)
    callback = Gradients()
    fit = trainer(accumulate_grad_batches=parts, callbacks=[callback])
    fit.fit(copy.deepcopy(module), DataLoader(batches, batch_size=None))
    return callback.caught


def assert_same_gradients(gradients: list[list[torch.Tensor]]) -> None:
    assert sum(float(weight.abs().sum()) for weight in gradients[0]) > 0
    for other in gradients[1:]:
        for left, right in zip(gradients[0], other, strict=True):
            assert float((left - right).norm()) <= 1e-6 * float(left.norm())


@pytest.mark.parametrize("module", [DPOModule(model(), DPOConfig(), 1), KTOModule(model(), KTOConfig(), 1)])
def test_the_reference_is_neither_trained_nor_saved(module):
    names = set(dict(LlamaForCausalLM.named_parameters(module.policy.hf)))
    assert {name.removeprefix("policy.hf.") for name, _ in module.named_parameters()} == names
    assert all(name.startswith("policy.hf.") for name in module.state_dict())
    ids, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 0]])
    before = module.reference.logprobs(ids, mask)
    moved(module)
    assert torch.equal(before, module.reference.logprobs(ids, mask)) and not before.requires_grad


def test_before_the_first_step_policy_and_reference_agree():
    """DPO then costs ln 2, KTO 1/2."""
    pairs, rows = some_pairs(), some_judged()
    loss, count, _ = DPOModule(model(), DPOConfig(), 1).losses(collate_dpo(pairs, pairs, 0))
    assert loss.item() / count == pytest.approx(0.693147, abs=1e-6)
    loss, count, _ = KTOModule(model(), KTOConfig(), 1).losses(collate(rows, rows, 0))
    assert loss.item() / count == pytest.approx(0.5, abs=1e-6)


prompts = st.lists(st.integers(1, 6), min_size=2, max_size=16)


@given(prompts)
def test_every_response_goes_to_another_prompt_where_there_is_one(drawn):
    """Responses are numbered from 100, so that each can be recognised."""
    rows = [UnpairedExample([prompt, 100 + index], 1, True) for index, prompt in enumerate(drawn)]
    pairs = mismatched(rows, MAX_LENGTH)
    assert sorted(pair.token_ids[0] for pair in pairs) == sorted(drawn)
    assert sorted(pair.token_ids[1] for pair in pairs) == [100 + index for index in range(len(drawn))]
    own = sum(drawn[pair.token_ids[1] - 100] == pair.token_ids[0] for pair in pairs)
    if max(drawn.count(prompt) for prompt in drawn) <= len(drawn) // 2:
        assert own == 0


def test_mismatched_texts_are_cut_and_a_lone_row_has_none():
    long = [UnpairedExample([1, 2, 3, 4], 3, True), UnpairedExample([1, 2, 3, 4], 1, False)]
    # [1] before [4]; [1, 2, 3] before [2, 3, 4], of which one token is left.
    assert [(pair.token_ids, pair.prompt_length) for pair in mismatched(long, 4)] == [([1, 4], 1), ([1, 2, 3, 2], 3)]
    assert mismatched(long[:1], 4) == []


@given(prompts, st.integers(1, 5), st.integers(1, 4))
def test_ranks_share_the_mismatched_texts_in_equally_many_batches(drawn, size, ranks):
    """Or ZeRO-3, whose ranks gather weights together, would wait for ever."""
    assume(len(drawn) >= ranks)
    rows = [UnpairedExample([prompt, 2, 3], 1, True) for prompt in drawn]
    pairs = MismatchedPairs(rows, 0, FitConfig(micro_batch_size=size), MAX_LENGTH)
    shares = [list(pairs.micro_batches(rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    sizes = [len(batch.input_ids) for share in shares for batch in share]
    assert sum(sizes) == len(rows) and min(sizes) > 0 and max(sizes) <= max(size, 2)


@given(prompts)
def test_mismatched_texts_keep_to_the_token_budget(drawn):
    rows = [UnpairedExample([prompt] * prompt + [2, 3], prompt, True) for prompt in drawn]
    pairs = MismatchedPairs(rows, 0, FitConfig(micro_batch_tokens=16), MAX_LENGTH)
    assert all(batch.input_ids.numel() <= 16 for batch in pairs.micro_batches())


def test_the_balance_of_the_weights_is_reported():
    rows = some_judged()
    assert balance(rows, KTOConfig(undesirable_weight=2.0)).startswith(
        "6 desirable and 2 undesirable rows, weighted 1.50"
    )
    assert balance([row for row in rows if row.desirable], KTOConfig()) == "6 desirable and 0 undesirable rows"
