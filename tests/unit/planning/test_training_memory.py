"""Shares and buffers of a trained model, against numbers derived by hand."""

from collections import Counter
from types import SimpleNamespace

import pytest

from nemo_style_rlhf.planning import training_memory
from nemo_style_rlhf.planning.device import Device
from nemo_style_rlhf.schema.common import EngineConfig

MILLION = 10**6


@pytest.mark.parametrize(
    ("stage", "ranks", "width", "weights", "gradients", "masters", "states"),
    [
        # bf16, one rank: 2 + 2 + 4 + 8 = 16 bytes per parameter, the sum of arXiv 1910.02054, section 3.1.
        (1, 1, 2, 200, 200, 400, 800),
        # Four ranks: masters and states are quartered by stage 1, gradients by stage 2.
        (1, 4, 2, 200, 200, 100, 200),
        (2, 4, 2, 200, 50, 100, 200),
        # Stage 3 quarters the weights; below 10^9 elements the whole is gathered beside its share: 50 + 200.
        (3, 4, 2, 250, 50, 100, 200),
        (0, 1, 2, 200, 200, 400, 800),
        # fp32 without ZeRO has no masters; with it the weights are there twice.
        (0, 1, 4, 400, 400, 0, 800),
        (1, 1, 4, 400, 400, 400, 800),
    ],
)
def test_what_is_held_for_100_million_parameters(stage, ranks, width, weights, gradients, masters, states):
    share = {"stage": stage, "ranks": ranks}
    trained = 100 * MILLION
    assert training_memory.weights(trained, 0, width, **share) == weights * MILLION
    assert training_memory.gradients(trained, width, **share) == gradients * MILLION
    assert training_memory.masters(trained, width, **share) == masters * MILLION
    assert training_memory.optimizer_states(trained, **share) == states * MILLION


def test_frozen_weights_have_neither_gradients_nor_states():
    assert training_memory.weights(1, 100, 2, stage=1, ranks=1) == 202
    assert training_memory.gradients(1, 2, stage=1, ranks=1) == 2


def test_the_buffers_of_an_optimizer_step():
    # bf16: bucket 2, share 2, flat 2, fp32 4 bytes per parameter.
    assert sum(training_memory.step_buffers(100, 2, stage=1, ranks=1).values()) == 1000
    # fp32: nothing to cast, so bucket, share and flat of 4 bytes each.
    assert sum(training_memory.step_buffers(100, 4, stage=1, ranks=1).values()) == 1200
    # Two ranks in bf16: bucket and its flattened copy are whole (200 each), the others half: 100, 100, 200.
    assert sum(training_memory.step_buffers(100, 2, stage=1, ranks=2).values()) == 800
    assert sum(training_memory.step_buffers(100, 4, stage=0, ranks=1).values()) == 400
    assert sum(training_memory.step_buffers(100, 2, stage=0, ranks=1).values()) == 200 + 400


@pytest.mark.parametrize(
    ("stage", "ranks", "width", "offload", "backward", "step"),
    [
        # 10^9 elements, buckets of half of them. fp32 without ZeRO: gradients 4000; in the step a flattened bucket of 2000, too.
        (0, 1, 4, False, 4000, 6000),
        # bf16: fp32 gradients take the place of the others one by one.
        (0, 1, 2, False, 2000, 4000),
        # bf16: gradients 2000, bucket 1000. Alone: share 2000, flat 2000, fp32 4000.
        (1, 1, 2, False, 3000, 8000),
        # Of four ranks the shares are 500: the bucket beside all gradients is more than 500 + 500 + 1000.
        (1, 4, 2, False, 3000, 3000),
        # ZeRO-2 has no gradients but shares, an earlier one and a new one; where ranks are several, bucket and copy.
        (2, 1, 2, False, 1000 + 2 * 2000, 8000),
        (2, 4, 2, False, 2 * 1000 + 2 * 500, 2000),
        # ZeRO-3 has bucket and share anyway: the bucket's copy; flat 500 and fp32 1000.
        (3, 4, 2, False, 1000, 1500),
        # In host memory: a tensor of 10^7 elements moves there; its norm, taken in fp64, has 80.
        (1, 4, 2, True, 3000, 3000),
        (2, 4, 2, True, 2 * 1000 + 20, 80),
        (3, 4, 2, True, 1000 + 20, 80),
    ],
)
def test_what_gradients_pass_through_on_a_gpu(stage, ranks, width, offload, backward, step):
    given = {"stage": stage, "ranks": ranks, "offload": offload}
    sizes = (1000 * MILLION, 10 * MILLION, width)
    assert training_memory.backward_buffers(*sizes, **given) == backward * MILLION
    assert training_memory.optimizer_step_buffers(*sizes, **given) == step * MILLION


def test_a_small_model_is_in_one_bucket():
    given = {"stage": 2, "ranks": 4, "offload": False}
    assert training_memory.backward_buffers(100 * MILLION, MILLION, 2, **given) == (2 * 200 + 2 * 50) * MILLION


def test_zero_3_keeps_a_bucket_and_a_share_and_steps_sub_groups():
    assert training_memory.kept_for_gradients(1000 * MILLION, 2, ranks=4, offload=False) == (1000 + 500) * MILLION
    assert training_memory.kept_for_gradients(1000 * MILLION, 2, ranks=4, offload=True) == 1000 * MILLION
    # A share of 2 x 10^9 elements in sub-groups of 10^9: flat 2000, fp32 4000.
    given = {"stage": 3, "ranks": 2, "offload": False}
    assert training_memory.optimizer_step_buffers(4000 * MILLION, MILLION, 2, **given) == 6000 * MILLION


def test_the_first_rank_copies_its_share_of_the_states_and_the_weights():
    assert training_memory.checkpoint_copy(100, 2, stage=1, ranks=1) == 100 * (4 + 8 + 2)
    assert training_memory.checkpoint_copy(100, 2, stage=2, ranks=2) == 50 * (4 + 8) + 200
    assert training_memory.checkpoint_copy(100, 2, stage=3, ranks=2) == 50 * (4 + 8)
    assert training_memory.checkpoint_copy(100, 4, stage=0, ranks=2) == 100 * (8 + 4)
    assert training_memory.checkpoint_copy(100, 2, stage=0, ranks=2) == 100 * (4 + 8 + 2)


@pytest.mark.parametrize(
    ("stage", "activations", "checkpoint"),
    [
        # fp32: the copy is 1600 with masters, the buffers 1200.
        (1, 300, 400),
        (1, 2000, 400),
        # Without ZeRO 1200 and 400, and the copy's blocks fit where activations were.
        (0, 300, 500),
        (0, 2000, 0),
    ],
)
def test_where_the_copy_of_a_checkpoint_fits_on_a_cpu(stage, activations, checkpoint):
    model = SimpleNamespace(trained=100, width=4)
    host = Device("cpu", memory=0, name="")
    phases = training_memory.training_phases(
        model, EngineConfig(zero_stage=stage), host, Counter(), {}, Counter(activations=activations), ranks=1
    )
    assert phases[0].parts["checkpoint"] == checkpoint
