"""Seconds of a step, against numbers derived by hand."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.planning.seconds import rollout, step_seconds, training
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.plan import PlanConfig

# A policy of 10^9 parameters in 2 bytes, whose forward costs 2 x 10^9 FLOPs per token, with 10^5 bytes of KV cache per token.
POLICY: Any = SimpleNamespace(
    base_weights=2 * 10**9, kv_bytes_per_token=10**5, forward_flops=lambda length: 2 * 10**9 * length
)
CACHE = 10**11
GIVEN = [
    "model.path=x", "critic.model.path=x", "run.output_dir=x", "critic.run.output_dir=x", "data.train_path=x",
    "generation.max_length=1000", "algorithm.num_rollout_samples=512", "device_tflops=1000", "device_gb_per_s=1000",
]  # fmt: skip


def config(*given: str) -> PlanConfig:
    return build(PlanConfig, OmegaConf.from_dotlist([*GIVEN, *given]))


@pytest.mark.parametrize(
    ("given", "generators", "cache", "seconds"),
    [
        # 2 rounds of 256 rows. Prompts: 256 x 500 x 2e9 / 4e14 = 0.64 s. A step reads 2e9 + 256 x 1000 x 1e5 = 27.6e9 bytes at
        # 6e11 bytes/s: 46 ms, longer than its 256 x 2e9 / 4e14 = 1.28 ms of matrix products.
        ((), 1, CACHE, 2 * (0.64 + 46)),
        # One round of 128 rows: 0.32 s, and (2e9 + 12.8e9) / 6e11 = 24.67 ms a step. Half the samples take more than half.
        ((), 4, CACHE, 0.32 + 24.6667),
        # A cache of 100 sequences of 1500 tokens, 1.5e10 bytes: 6 rounds of 86 rows.
        ((), 1, 15 * 10**9, 6 * (0.215 + (2e9 + 8.6e9) / 6e8)),
        # Two devices have twice the cache, bandwidth and FLOP/s.
        (("generation.tensor_parallel_size=2", "ranks=2"), 1, CACHE // 2, 0.64 + 46),
        # With 6e14 bytes/s, a step lasts as long as its matrix products.
        (("device_gb_per_s=1000000",), 1, CACHE, 2 * (0.64 + 1.28)),
    ],
)
def test_a_rollout(given, generators, cache, seconds):
    found = rollout(config(*given), POLICY, prompt_length=500, cache=cache, generators=generators)
    assert found.seconds == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize(
    ("given", "critic", "passes"),
    [  # A pass over 512 x 1500 tokens: 512 x 1500 x 2e9 / 4e14 = 3.84 s.
        ((), None, 2 + 3),
        (("algorithm.old_logprobs=sampler", "algorithm.initial_policy_kl_penalty=0"), None, 3),
        (("algorithm.ppo_epochs=2", "model.gradient_checkpointing=true"), None, 2 + 2 * 4),
        (("model.lora.rank=4",), None, 2 + 2),
        (("ranks=4",), None, (2 + 3) / 4),
        (("ranks=4",), POLICY, 2 / 4 + 3),  # the critic's one rank takes longer than the actor's four
        (("together=true",), POLICY, 2 + 3 + 3),
    ],
)
def test_training(given, critic, passes):
    assert training(config(*given), POLICY, critic, prompt_length=500).seconds == pytest.approx(3.84 * passes)


@pytest.mark.parametrize(("lora", "update"), [(0, 3), (4, 2)])
def test_a_reference_of_its_own_takes_its_own_time(lora, update):
    """It has 5 times the policy's parameters: its pass takes 5 x 3.84 s."""
    reference: Any = SimpleNamespace(forward_flops=lambda length: 10**10 * length)
    given = config("model.reference_path=x", f"model.lora.rank={lora}")
    found = training(given, POLICY, None, prompt_length=500, reference=reference)
    assert found.seconds == pytest.approx(3.84 * (1 + update + 5))
    assert found.formula.startswith(f"1 + {update} passes") and "; 19.2 s for the reference's pass" in found.formula


@pytest.mark.parametrize(
    ("given", "said"),
    [
        # Training takes 19.2 s, and 3 engines 171 rows each: 0.43 + (2e9 + 17.1e9) / 6e8 = 32.3 s; 6 of 86 rows 17.9 s.
        (("generation.engines.count=3",), "the rollout is the longer part: a step lasts 51.5 s .*\nFrom .*count=6 on"),
        # One row: 2.5 ms for the prompt, and 2.1e9 / 6e11 = 3.5 ms for each of 1000 steps. Training: 19.2 / 16 = 1.2 s.
        (("ranks=16",), "the rollout is the longer part: .*\nNo number of engines"),
        (("ranks=2", "generation.tensor_parallel_size=2"), "training behind the rollout.\nFrom .*count=6 on"),
    ],
)
def test_the_estimate_says_which_part_is_longer_and_how_many_engines_it_takes(given, said):
    text = step_seconds(config(*given), POLICY, None, prompt_length=500, cache=CACHE)
    assert text.startswith("Estimated, not measured, at an assumed 40% of 1000 TFLOP/s and 60% of 1000 GB/s")
    assert re.search(said, text), text
