"""docs/migrating.md names every flag of OpenRLHF and of the guides that users come from, and only settings that exist."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import product, takewhile

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch.composition import CONF_DIR, compose
from nemo_style_rlhf.launch.ray_placement import place
from nemo_style_rlhf.schema.base import build, keys
from nemo_style_rlhf.schema.programs import SCHEMAS
from nemo_style_rlhf.schema.ray import PPORayConfig
from tests.support.pages import blocks, commands_of
from tests.support.paths import ROOT

SEEDS = sorted((ROOT.parent / "shared" / "seeds").glob("*.txt"))
PAGE = (ROOT / "docs" / "migrating.md").read_text()
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:[_.-][a-z0-9]+)*)")
NEEDED = ["run.output_dir=outputs", "model.path=owner/model", "data.train_path=owner/rows"]
NEEDS = {
    "ppo_actor": NEEDED,
    "ppo_critic": NEEDED[:2],
    "ppo_local": [*NEEDED, "critic.model.path=owner/reward"],
    "ppo_ray": [*NEEDED, "critic.model.path=owner/reward"],
    "reward_server": NEEDED[1:2],
    **dict.fromkeys(("sft", "reward_model", "dpo", "kto"), NEEDED),
}
"""Settings that a program requires, by its file in ``conf/``."""
CONTEXTS = (
    [],
    ["algorithm=grpo"],  # of TRL's GRPOTrainer
    ["data.val_path=owner/rows", "algorithm.val_check_interval=10"],  # for what validation decides
    ["model.lora.rank=4", "engine.zero_stage=2"],
    ["correction=tis"],
)
"""Settings that others may need beside them."""
GROUPS = {path.name for path in CONF_DIR.iterdir() if path.is_dir()}
UNTIL_0_10_1 = """
actor_init_on_gpu actor_learning_rate actor_num_gpus_per_node actor_num_nodes adam_betas adam_offload advantage_estimator
agent_func_path apply_chat_template async_queue_size async_train attn_implementation aux_loss_coef batch_size best_metric_key
beta chosen_key ckpt_path colocate_actor_ref colocate_all_models colocate_critic_reward compute_fp32_loss critic_learning_rate
critic_num_gpus_per_node critic_num_nodes critic_pretrain dataloader_num_workers dataset dataset_probs dataset_split deepcompile
deepspeed_enable_sleep disable_ds_ckpt disable_fast_tokenizer ds_tensor_parallel_size dual_clip dynamic_filtering
dynamic_filtering_reward_range ema_beta enable_ema enable_prefix_caching enable_vllm_is_correction enforce_eager
entropy_loss_coef eps_clip eps_clip_low_high eval_dataset eval_n_samples_per_prompt eval_split eval_steps eval_temperature
freeze_visual_encoder freezing_actor_steps full_determinism gamma grad_accum_dtype gradient_checkpointing
gradient_checkpointing_use_reentrant host image_key init_kl_coef input_key input_template ipo is_rm kl_estimator kl_horizon
kl_target l2 label_key label_smoothing lambd learning_rate load_checkpoint load_in_4bit local_rank logging_steps lora_alpha
lora_dropout lora_path lora_rank loss lr_scheduler lr_warmup_ratio margin_loss max_ckpt_mem max_ckpt_num max_epochs
max_images_per_prompt max_len max_new_tokens max_norm max_samples micro_rollout_batch_size micro_train_batch_size min_lr_ratio
model_path multiturn n_samples_per_prompt nll_loss_coef no_advantage_std_norm normalize_reward num_episodes output_key
output_path overlap_comm overlong_buffer_len overlong_penalty_factor packing_samples param_dtype partial_rollout perf
policy_loss_type port pretrain pretrain_mode prompt_data prompt_data_probs prompt_key prompt_split ptx_coef
ref_num_gpus_per_node ref_num_nodes ref_offload ref_pretrain ref_reward_offload rejected_key remote_rm_url reward_clip_range
reward_num_gpus_per_node reward_num_nodes reward_pretrain ring_attn_size ring_head_stride rollout_batch_size
rollout_max_tokens_per_gpu save_hf_ckpt save_path save_steps save_value_network seed stop_properly_penalty_coef target_modules
temperature tokenizer_chat_template top_p train_batch_size train_max_tokens_per_gpu train_split use_ds_universal_ckpt
use_dynamic_batch use_kl_loss use_liger_kernel use_ms use_tensorboard use_wandb value_clip value_head_prefix vllm_enable_sleep
vllm_generate_batch_size vllm_gpu_memory_utilization vllm_is_correction_type vllm_is_truncated_threshold vllm_num_engines
vllm_sync_backend vllm_sync_with_ray vllm_tensor_parallel_size wandb_group wandb_org wandb_project wandb_run_name zero_stage zpg
""".split()  # noqa: SIM905
"""The flags of OpenRLHF 0.10.1, of April 2026: train_ppo_ray, train_sft, train_rm, train_dpo, serve_rm and lora_combiner."""
SINCE_0_10_2 = """
actor.adam.betas actor.adam.eps actor.adam.lr actor.adam.weight_decay actor.aux_loss_coef actor.dual_clip actor.entropy_coef
actor.eps_clip actor.eps_clip_low_high actor.freeze_visual_encoder actor.gradient_checkpointing_enable
actor.gradient_checkpointing_reentrant actor.loss_agg_mode actor.lr_scheduler actor.lr_warmup_ratio actor.max_norm
actor.min_lr_ratio actor.model_name_or_path actor.muon.lr actor.muon.momentum actor.muon.nesterov actor.muon.no_nesterov
actor.muon.ns_steps actor.num_gpus_per_node actor.num_nodes actor.optim actor.policy_loss_type adam.betas adam.eps adam.lr
adam.weight_decay algo.advantage.estimator algo.advantage.gamma algo.advantage.is_correction_enable
algo.advantage.is_correction_gating algo.advantage.is_correction_level algo.advantage.is_correction_mode
algo.advantage.is_correction_threshold algo.advantage.is_correction_type algo.advantage.lambd algo.advantage.no_std_norm
algo.dynamic_filtering_enable algo.dynamic_filtering_range algo.kl.estimator algo.kl.horizon algo.kl.init_coef algo.kl.target
algo.kl.unbiased_gradient algo.kl.use_loss batch_size ckpt.best_metric_key ckpt.disable_ds ckpt.load_enable ckpt.max_mem
ckpt.max_num ckpt.output_dir ckpt.path ckpt.save_hf ckpt.save_steps critic.adam.betas critic.adam.eps critic.adam.lr
critic.adam.weight_decay critic.freezing_steps critic.lr_scheduler critic.lr_warmup_ratio critic.max_norm critic.min_lr_ratio
critic.model_name_or_path critic.muon.lr critic.muon.momentum critic.muon.nesterov critic.muon.no_nesterov critic.muon.ns_steps
critic.num_gpus_per_node critic.num_nodes critic.optim critic.save_value_network critic.value_clip data.apply_chat_template
data.chosen_key data.dataloader_num_workers data.dataset data.dataset_probs data.dataset_split data.disable_fast_tokenizer
data.image_key data.input_key data.input_template data.label_key data.max_images_per_prompt data.max_len data.max_samples
data.multiturn data.output_key data.prompt_dataset data.prompt_key data.prompt_probs data.prompt_split data.rejected_key
data.tokenizer_chat_template ds.adam_offload ds.attn_implementation ds.deepcompile ds.enable_sleep ds.experts_implementation
ds.grad_accum_dtype ds.load_in_4bit ds.lora.alpha ds.lora.dropout ds.lora.rank ds.lora.target_modules ds.overlap_comm
ds.packing_samples ds.param_dtype ds.ring_attn_head_stride ds.ring_attn_size ds.tensor_parallel_size ds.use_liger_kernel
ds.use_universal_ckpt ds.value_head_prefix ds.zero_stage ds.zpg eval.dataset eval.n_samples_per_prompt eval.split eval.steps
eval.temperature host is_rm local_rank logger.logging_steps logger.tensorboard_dir logger.wandb.group logger.wandb.key
logger.wandb.org logger.wandb.project logger.wandb.run_name lora_path lr_scheduler lr_warmup_ratio max_norm min_lr_ratio
model.aux_loss_coef model.beta model.compute_fp32_loss_enable model.gradient_checkpointing_enable
model.gradient_checkpointing_reentrant model.ipo_enable model.label_smoothing model.loss_type model.margin_loss_enable
model.model_name_or_path model.nll_loss_coef model.pretrain_mode_enable model_path muon.lr muon.momentum muon.nesterov
muon.no_nesterov muon.ns_steps optim output_path port ref.model_name_or_path ref.num_gpus_per_node ref.num_nodes ref.offload
reward.clip_range reward.model_name_or_path reward.normalize_enable reward.num_gpus_per_node reward.num_nodes reward.offload
reward.overlong_buffer_len reward.overlong_penalty_factor reward.remote_url reward.stop_properly_penalty_coef rollout.batch_size
rollout.max_new_tokens rollout.max_tokens_per_gpu rollout.micro_batch_size rollout.n_samples_per_prompt rollout.temperature
rollout.top_p rollout.vllm_generate_batch_size train.agent_func_path train.async_enable train.async_queue_size train.batch_size
train.colocate_actor_ref train.colocate_all train.colocate_critic_reward train.dynamic_batch_enable train.ema_beta
train.enable_ema train.full_determinism_enable train.max_epochs train.max_tokens_per_gpu train.micro_batch_size
train.num_episodes train.partial_rollout_enable train.seed use_ms vllm.enable_prefix_caching vllm.enable_sleep
vllm.enforce_eager vllm.gpu_memory_utilization vllm.num_engines vllm.sync_backend vllm.sync_with_ray vllm.tensor_parallel_size
""".split()  # noqa: SIM905
"""The flags of OpenRLHF 0.10.2, of April 2026, and of 0.11.2, of September 2026: the same programs."""


def expanded(name: str) -> Iterator[str]:
    """The names for which one with braces stands: a.{b, c} for a.b and a.c."""
    parts = [part.split(",") if index % 2 else [part] for index, part in enumerate(re.split(r"[{}]", name))]
    return ("".join(word.strip() for word in words) for words in product(*parts))


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def named_flags() -> set[str]:
    """All flags in code on the page."""
    found = (match for span in spans(PAGE) for match in re.findall(r"--((?:[a-z0-9_.-]|\{[^}]*\})+)", span))
    return {flag for match in found for flag in expanded(match)}


def test_every_flag_of_openrlhf_has_its_line() -> None:
    assert {*UNTIL_0_10_1, *SINCE_0_10_2} - named_flags() == set()


@pytest.mark.skipif(not SEEDS, reason="the guides, ../shared/seeds, do not lie beside this checkout")
def test_every_flag_of_the_guides_has_its_line_and_their_main_command_is_ours() -> None:
    flags = {flag for path in SEEDS for flag in FLAG.findall(path.read_text())}
    assert len(flags) > 60
    assert flags - named_flags() == set()
    words = " ".join(MAIN_COMMAND)
    assert any(words in path.read_text().replace(" \\\n", " ").replace("\n", " ") for path in SEEDS)


def cells() -> Iterator[str]:
    """The last cell of each line: the equivalent here."""
    for line in PAGE.splitlines():
        if line.startswith("| "):
            yield line.split("|")[-2]


def settings() -> Iterator[tuple[str, ...]]:
    """The settings of each span in code, as overrides; a key without a value stands for itself."""
    for cell in cells():
        section = ""
        for span in spans(cell):
            if span.startswith("."):
                span = section + span
            if not re.fullmatch(r"([a-z_]+(\.[a-z_]+)+(\.?\{[a-z_, ]+\})?|\+?[a-z_]+(\.[a-z_]+)*=.*)", span):
                continue
            words = re.split(r"\s+(?=[a-z_.]+=)", span)
            section = words[0].partition("=")[0].rpartition(".")[0]
            yield tuple(name for word in words for name in (expanded(word) if "=" not in word else [word]))


def why_not(program: str, overrides: tuple[str, ...], context: list[str]) -> str | None:
    """The reason for which a program does not take settings; None if it does."""
    given = [word for word in overrides if "=" in word]
    try:
        config = compose(program, [*NEEDS[program], *context, *map(quoted, given)])
        build(SCHEMAS[program], config)
        for key in overrides:
            if "=" not in key:
                OmegaConf.select(config, key, throw_on_missing=True)
                parent = OmegaConf.select(config, key.rpartition(".")[0])
                if parent is None or key.rpartition(".")[2] not in parent:
                    return f"no {key}"
    except (HydraException, UserError) as error:
        return str(error)
    return None


def quoted(word: str) -> str:
    """A value with blanks, as a shell would hand it over, in the quotes that Hydra wants."""
    key, _, value = word.partition("=")
    text = value.strip("\"'")
    return f"{key}='{text}'" if " " in text else f"{key}={text}"


FOUND = sorted(set(settings()))


@cache
def known(program: str) -> frozenset[str]:
    """Its keys, and the groups above them."""
    return frozenset(
        ".".join(parts[:length])
        for parts in (key.split(".") for key in keys(SCHEMAS[program]))
        for length in range(1, len(parts) + 1)
    )


@pytest.mark.parametrize("overrides", FOUND, ids=" ".join)
def test_every_equivalent_composes(overrides: tuple[str, ...]) -> None:
    """By at least one program that has its keys, alone or beside what it needs."""
    named = {word.partition("=")[0] for word in overrides if not word.startswith("+")}
    programs = [program for program in NEEDS if named <= known(program) | GROUPS]
    assert programs, f"no program has {sorted(named)}"
    attempts = (why_not(program, overrides, context) for context, program in product(CONTEXTS, programs))
    refused = list(takewhile(lambda reason: reason is not None, attempts))
    assert len(refused) < len(programs) * len(CONTEXTS), refused


def test_the_page_names_settings() -> None:
    assert len(FOUND) > 150
    assert ("algorithm.advantage_std_norm=false",) in FOUND and ("checkpoint.save_hf=true",) in FOUND


def test_every_program_that_the_page_names_exists() -> None:
    named = {
        word for span in spans(PAGE) for word in span.split() if re.fullmatch(r"(trainers|servers|slurm)/\S+", word)
    }
    assert len(named) >= 8
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


MAIN_COMMAND = """
--ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 --critic_num_nodes 1
--critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 --vllm_num_engines 4 --vllm_tensor_parallel_size
2 --colocate_all_models --vllm_gpu_memory_utilization 0.5 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain
OpenRLHF/Llama-3-8b-rm-700k --save_path ./output/llama3-8b-rlhf --micro_train_batch_size 8 --train_batch_size 128
--micro_rollout_batch_size 16 --rollout_batch_size 1024 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024
--zero_stage 3 --bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --normalize_reward
--gradient_checkpointing --packing_samples --vllm_enable_sleep --deepspeed_enable_sleep
""".split()  # noqa: SIM905
"""The guides' main command, which they submit to Ray."""


def test_the_guides_main_command_has_its_equivalent_under_ray() -> None:
    """That of docs/ray.md, which says the same of GPUs, batches, optimizers and lengths."""
    given = dict(re.findall(r"--(\w+)(?: ([^-]\S*))?", " ".join(MAIN_COMMAND)))
    (command,) = (
        command
        for block in blocks(ROOT / "docs" / "ray.md", "bash")
        for command in commands_of(block)
        if "placement=colocated" in command
    )
    config = build(PPORayConfig, compose("ppo_ray", shlex.split(command.partition("train_ppo_ray.py ")[2])))
    placement = place(config, on_gpus=True)
    gpus = int(given["actor_num_nodes"]) * int(given["actor_num_gpus_per_node"])
    (bundle,) = placement.bundles  # every flag of GPUs names the same 8
    assert bundle["GPU"] == gpus == config.ranks == config.critic_ranks
    assert config.launched_engines == int(given["vllm_num_engines"])
    assert config.generation.tensor_parallel_size == int(given["vllm_tensor_parallel_size"])
    assert config.generation.gpu_memory_utilization == float(given["vllm_gpu_memory_utilization"])
    assert config.algorithm.num_rollout_samples == int(given["rollout_batch_size"])
    assert config.algorithm.mini_batches == int(given["rollout_batch_size"]) // int(given["train_batch_size"])
    assert config.algorithm.ppo_epochs == int(given["max_epochs"])
    assert config.data.max_prompt_length == int(given["prompt_max_len"])
    assert config.generation.max_length == int(given["generate_max_len"])
    assert config.algorithm.initial_policy_kl_penalty == float(given["init_kl_coef"])
    assert config.critic.reward_model.normalize_rewards
    assert config.engine.optim.lr == float(given["actor_learning_rate"])
    assert config.critic.engine.optim.lr == float(given["critic_learning_rate"])
    assert config.placement.in_turns == ("vllm_enable_sleep" in given and "deepspeed_enable_sleep" in given)
    for half in (config, config.critic):
        assert half.engine.zero_stage == int(given["zero_stage"])
        assert half.model.gradient_checkpointing and half.model.packing and half.model.dtype == "bfloat16"
