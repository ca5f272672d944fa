"""Whole plans of tiny models: which parts a process has, and what a setting does to them."""

import json
from collections.abc import Collection
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.planning.advice import best_changes, candidates
from nemo_style_rlhf.planning.phases import ACTOR, CRITIC, GIB
from nemo_style_rlhf.planning.run import Planner
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.plan import PlanConfig
from tests.support.models import SHAPE, save_policy, save_reward_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [
        f"model.path={save_policy(folder / 'policy')}", f"critic.model.path={save_reward_model(folder / 'reward')}",
        "run.output_dir=x", "critic.run.output_dir=x", "data.train_path=''", "generation.max_length=16", "run.device=cpu",
        "device_gib=80",
    ]  # fmt: skip


def plans(models: list[str], *given: str) -> dict[str, dict[str, int]]:
    config = build(PlanConfig, OmegaConf.from_dotlist([*models, *given]))
    return {plan.name: plan.peak.parts for plan in Planner(config).plan(config)}


def test_each_process_has_its_parts(models):
    found = plans(models)
    assert found[ACTOR]["reference"] == found[ACTOR]["weights"]
    assert found[ACTOR]["KV cache"] == GIB
    assert "reward model" not in +found[ACTOR]
    assert found[CRITIC]["reward model"] == found[CRITIC]["weights"]
    assert "vLLM weights" not in +found[CRITIC]


def test_settings_take_parts_away(models):
    without = plans(
        models, "algorithm.initial_policy_kl_penalty=0", "critic.reward_model.combine_rm_and_critic_server=false"
    )
    assert "reference" not in +without[ACTOR] and "reward model" not in +without[CRITIC]
    server = ("reward.critic.weight=0", "reward.server.weight=1")
    assert CRITIC not in plans(models, "algorithm.advantage_estimator=reinforce", *server)
    assert plans(models, "generation.kv_cache_gib=0.5")[ACTOR]["KV cache"] == GIB // 2


def test_a_reference_of_its_own_has_its_own_size_also_beside_adapters(models, tmp_path):
    large = f"model.reference_path={save_policy(tmp_path / 'large', num_hidden_layers=4, max_position_embeddings=64)}"
    blueprint = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": 4}))
    size = 2 * sum(parameter.numel() for parameter in blueprint.parameters())
    for settings in ((), ("model.lora.rank=4",)):
        assert plans(models, large, *settings)[ACTOR]["reference"] == size
        gpu = (*settings, "run.device=cuda", "generation.gpu_memory_utilization=0.3", "model.reference=cpu_offload")
        assert "reference" not in +plans(models, large, *gpu)[ACTOR]
    assert "reference" not in +plans(models, "model.lora.rank=4")[ACTOR]
    with pytest.raises(UserError, match=r"max_length=64 leaves no prompt a place in the 64 positions of .*large"):
        plans(models, large, "generation.max_length=64")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_critic_the_server_holds_the_reward_model_alone(models, device):
    given = (f"run.device={device}", "critic.model.dtype=bfloat16")
    learns, scores = (
        plans(models, *given)[CRITIC],
        plans(models, *given, "algorithm.advantage_estimator=reinforce")[CRITIC],
    )
    assert scores["reward model"] == learns["reward model"] == learns["weights"]
    assert {"weights", "fp32 masters", "optimizer states"} <= (+learns).keys()
    assert (+scores).keys() <= {"libraries", "reward model", "activations", "logits"}


def test_where_a_critic_would_start_does_not_count_without_one(models, tmp_path):
    start = f"critic.value_model.path={save_reward_model(tmp_path / 'start', max_position_embeddings=32, num_hidden_layers=6)}"
    none = "algorithm.advantage_estimator=reinforce"
    assert plans(models, none, start) == plans(models, none)
    assert plans(models, start) != plans(models)


def test_a_gpu_offloads_and_gives_vllm_its_share(models):
    gpu = plans(models, "run.device=cuda", "generation.gpu_memory_utilization=0.3", "model.reference=cpu_offload")[
        ACTOR
    ]
    assert gpu["vLLM weights"] + gpu["KV cache"] == int(0.3 * 80 * GIB)
    assert "reference" not in +gpu


def test_a_smaller_cache_frees_nothing_of_what_vllm_wants_free_to_start(models):
    """As of vLLM 0.32: with a cache of its own size it fills less, but asks for gpu_memory_utilization all the same."""
    gpu = ("run.device=cuda", "generation.gpu_memory_utilization=0.5")
    cached = plans(models, *gpu, "generation.kv_cache_gib=0.5")[ACTOR]
    assert cached["vLLM weights"] + cached["KV cache"] + cached["free for vLLM"] == 40 * GIB
    assert not cached["optimizer states"]
    low = plans(models, "run.device=cuda", "generation.gpu_memory_utilization=0.001", "generation.kv_cache_gib=0.5")
    assert "free for vLLM" not in +low[ACTOR] and low[ACTOR]["KV cache"] == GIB // 2


def test_ranks_share_the_optimizer_states(models):
    alone, four = plans(models)[ACTOR], plans(models, "ranks=4")[ACTOR]
    assert four["optimizer states"] == alone["optimizer states"] // 4
    assert four["weights"] == alone["weights"]


@pytest.mark.parametrize("name", ["log-probabilities", "values and rewards", "forward and backward"])
def test_ranks_share_micro_batches_which_are_as_large_as_those_of_one(models, name):
    few = ("algorithm.num_rollout_samples=16", "algorithm.mini_batches=2", "run.device=cuda")
    activations = []
    for ranks in (1, 8):
        config = build(PlanConfig, OmegaConf.from_dotlist([*models, *few, f"ranks={ranks}", f"critic_ranks={ranks}"]))
        phases = [phase for process in Planner(config).plan(config) for phase in process.phases]
        activations.append([phase.parts["activations"] for phase in phases if phase.name == name])
    assert activations[0] == activations[1] != []


def test_advice_is_what_planning_again_says(models):
    config = build(PlanConfig, OmegaConf.from_dotlist(models))
    planner = Planner(config)
    changes = best_changes(config, planner, [ACTOR])
    assert [change.saved for change in changes] == sorted((change.saved for change in changes), reverse=True)
    halved = next(change for change in changes if change.text == "generation.kv_cache_gib=0.5")
    assert halved.saved == GIB // 2
    assert not any(change.text.startswith("critic.") for change in changes)


class HigherStagesSave:
    """As :class:`Planner`."""

    def demand(self, config: PlanConfig, names: Collection[str]) -> int:
        return (4 - config.engine.zero_stage) * GIB


@pytest.mark.parametrize(("rank", "advised"), [(0, ["engine.zero_stage=3"]), (4, [])])
def test_what_no_process_would_start_with_is_not_advised(models, rank, advised):
    given = ("ranks=2", "engine.zero_stage=2", f"model.lora.rank={rank}")
    config = build(PlanConfig, OmegaConf.from_dotlist([*models, *given]))
    assert [change.text for change in best_changes(config, HigherStagesSave(), [ACTOR])] == advised


def test_one_rank_is_advised_to_shard_nothing(models):
    for ranks, stages in ((1, [0]), (2, [2])):
        config = build(PlanConfig, OmegaConf.from_dotlist([*models, f"ranks={ranks}"]))
        assert [value for key, value in candidates(config) if key == "engine.zero_stage"] == stages


def test_what_a_gpu_offloads_is_not_on_it(models):
    on_gpu = ("run.device=cuda", "generation.gpu_memory_utilization=0.3", "engine.zero_stage=3", "ranks=2")
    all_there, none = (
        plans(models, *on_gpu, f"engine.offload_optimizer={offload}", f"engine.offload_parameters={offload}")[ACTOR]
        for offload in (False, True)
    )
    assert all_there["fp32 masters"] and all_there["optimizer states"]
    assert "fp32 masters" not in +none and "optimizer states" not in +none
    assert all_there["weights"] == 1.5 * none["weights"]


@pytest.mark.parametrize(("stage", "elements"), [(2, 0), (3, 78_144 + 78_144 // 2)])
def test_zero_3_on_a_gpu_keeps_room_for_gradients_while_it_samples(models, stage, elements):
    given = ("run.device=cuda", "ranks=2", f"engine.zero_stage={stage}")
    config = build(PlanConfig, OmegaConf.from_dotlist([*models, *given]))
    (actor,) = Planner(config).plan(config, [ACTOR])
    (rollout,) = [phase for phase in actor.phases if phase.name == "rollout"]
    assert rollout.parts["gradients"] == 2 * elements


def test_ranks_that_cannot_share_a_vllm_and_offloading_that_nothing_does_are_refused(models):
    for given, said in (
        (["ranks=3", "generation.tensor_parallel_size=2"], "ranks=3 is not possible: expected a multiple"),
        (["engine.offload_parameters=true"], "false without engine.zero_stage=3"),
        (["engine.offload_optimizer=true", "engine.zero_stage=0"], "false with engine.zero_stage=0"),
        (["engine.offload_optimizer=true", "engine.offload_optimizer_states=true"], "keeps them off the device"),
        (["engine.offload_optimizer_states=true", "engine.zero_stage=3"], "false with engine.zero_stage=3"),
        (["generation.tensor_parallel_size=0"], "a number of ranks from 1 up"),
        (["critic.engine.zero_stage=3", "critic.model.lora.rank=4"], "zero_stage=3 with model.lora.rank=4 .*=2"),
    ):
        with pytest.raises(UserError, match=said):
            plans(models, *given)


def write_prompts(path: Path, tokens: int) -> Path:
    path.write_text(json.dumps({"prompt": " ".join(["w1"] * tokens)}) + "\n")
    return path


def test_sequences_longer_than_a_model_takes_are_refused(models, tmp_path):
    short, long = write_prompts(tmp_path / "short.jsonl", 10), write_prompts(tmp_path / "long.jsonl", 100)
    shorter = f"critic.model.path={save_reward_model(tmp_path / 'reward', max_position_embeddings=64)}"
    plans(models, f"data.train_path={short}", "generation.max_length=54", shorter)
    plans(models, "generation.max_length=127")
    for given, said in (
        (["generation.max_length=128"], "max_length=128 leaves no prompt a place in the 128 positions of .*policy"),
        (
            [f"data.train_path={short}", "generation.max_length=55", shorter],
            "10 tokens .*=55 .* the 64 positions of .*reward",
        ),
        (
            [f"data.train_path={short}", "critic.server.max_length=25"],
            "10 tokens .*=16 .* 25 tokens of critic.server.max_length",
        ),
        (
            [f"data.train_path={short}", f"data.val_path={long}", "generation.max_length=29"],
            "100 tokens .* the 128 positions",
        ),
    ):
        with pytest.raises(UserError, match=said):
            plans(models, *given)


def test_prompts_the_run_would_refuse_are_refused(models, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "w1", "own": {"top_p": 0.9}}) + "\n")
    given = ["data.sampling_key=own", "algorithm.old_logprobs=sampler"]
    train, val = (f"data.{name}_path={tmp_path / 'prompts.jsonl'}" for name in ("train", "val"))
    plans(models, train, given[0])
    plans(models, val, *given)  # nothing is learned from them
    with pytest.raises(UserError, match=r"line 1: top_p=0\.9 "):
        plans(models, train, *given)
    with pytest.raises(UserError, match=r"overlong_buffer=17 is not possible: expected 0 to generation\.max_length=16"):
        plans(models, "algorithm.shaping.overlong_buffer=17")


# A policy of tests/support/models.py in bf16: 78,144 parameters, and 512 bytes of keys and values per token (see test_blueprint).
WEIGHTS, PER_TOKEN = 2 * 78_144, 512


@pytest.mark.parametrize("team", [1, 2])
def test_vllm_needs_room_for_its_weights_and_one_sequence(models, tmp_path, team):
    longest = f"data.train_path={write_prompts(tmp_path / 'prompts.jsonl', 48)}"  # 64 tokens with its response
    gpu = (longest, "run.device=cuda", f"generation.tensor_parallel_size={team}", f"ranks={team}")
    cache, share = 64 * PER_TOKEN // team, (WEIGHTS + 64 * PER_TOKEN) // team
    enough = plans(models, *gpu, f"generation.gpu_memory_utilization={(share + 1) / (80 * GIB)}")[ACTOR]
    assert share <= enough["vLLM weights"] + enough["KV cache"] <= share + 1
    plans(models, *gpu, f"generation.kv_cache_gib={cache / GIB}")
    for given, said in (
        (
            f"generation.gpu_memory_utilization={(share - 1) / (80 * GIB)}",
            "gpu_memory_utilization=.* weights take .* 64 tokens",
        ),
        (
            f"generation.kv_cache_gib={(cache - 1) / GIB}",
            "kv_cache_gib=.* one sequence of 64 tokens .*tensor_parallel_size",
        ),
    ):
        with pytest.raises(UserError, match=said):
            plans(models, *gpu, given)


def test_a_cpu_needs_room_for_one_sequence_too(models):
    cache = 128 * 2 * PER_TOKEN  # fp32
    longest = ("model.dtype=float32", "data.max_prompt_length=112", "generation.max_length=16")
    plans(models, *longest, f"generation.kv_cache_gib={cache / GIB}")
    with pytest.raises(UserError, match=r"kv_cache_gib=.* one sequence of 128 tokens"):
        plans(models, *longest, f"generation.kv_cache_gib={(cache - 1) / GIB}")
