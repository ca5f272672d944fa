"""Config groups that both processes and the supervised stages share."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.base import require, setting
from nemo_style_rlhf.schema.paths import CHECK, existing_file, model_folder

BEAT_S = 2.0
"""Seconds between the heartbeats of the process that owns an output_dir."""


@dataclass
class RunConfig:
    """A run's folder and device, and the settings that make it repeatable."""

    output_dir: str = MISSING
    """Folder for everything that the run writes. One server and one trainer may use it at a time."""
    takeover_s: float = setting(60.0, ge=5 * BEAT_S, expected=f"{5 * BEAT_S:g} seconds, 5 heartbeats, or more")
    """If the last user of output_dir ran on another machine, a start considers it dead after this time without a heartbeat.
    No wait is needed after a process that ended by itself."""
    seed: int = setting(1234, ge=0, expected="a number from 0 up")
    """Seed of data order, sampling and initialization; two runs with the same seed are equal to the last bit on CPU in fp32."""
    num_threads: int = setting(0, ge=0, expected="a number of threads, or 0 for torch's default")
    """torch intra-op threads; 0 leaves torch's default. Part of the result's bits: keep it when resuming."""
    device: str = setting("auto", among=("auto", "cpu", "cuda"))
    """auto (CUDA if there is an NVIDIA GPU), cpu (hides CUDA devices; a vLLM built for CUDA then needs generation=hf) or cuda."""
    deterministic: bool | None = None
    """true uses only kernels that repeat to the last bit, in trainer, critic server and engines, and refuses features without
    them, such as engines whose samples depend on what they are batched with. false uses the fastest kernels. null uses repeatable
    kernels on a CPU, without the refusals, and the fastest ones on a GPU. Part of the result's bits: keep it when resuming."""
    dry_run: bool = False
    """Load everything, run one tiny step of every phase and exit (command line: --dry-run)."""

    def repeatable(self, device: str) -> bool:
        """True if only repeatable kernels compute on a device of type ``device``."""
        return device == "cpu" if self.deterministic is None else self.deterministic


@dataclass
class TrainerRunConfig(RunConfig):
    """The settings of a run that writes checkpoints."""

    resume: str = setting("auto", among=("auto", "never", "must"))
    """auto (resume from the last committed checkpoint, if any), never (refuse an output_dir with checkpoints), or must."""


@dataclass
class LoRAConfig:
    """Train low-rank adapters (arXiv 2106.09685) instead of all weights; the model without adapters is the default reference."""

    rank: int = setting(0, ge=0, expected="a rank above 0, or 0 for no adapters")
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = setting(16, gt=0, expected="a whole number above 0")
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = setting(0.0, ge=0, lt=1, expected="a probability below 1")
    """Dropout on the adapter's input; needs model.disable_dropout=false."""
    target_modules: list[str] | None = None
    """Last names of the layers that get an adapter, such as q_proj; null for all linear layers but the head."""


@dataclass
class ModelConfig:
    """A Hugging Face checkpoint and how to compute with it."""

    path: str = field(default=MISSING, metadata={CHECK: model_folder})
    """A local Hugging Face directory or a hub name."""
    dtype: str = setting("bfloat16", among=("bfloat16", "float32"))
    """bfloat16 or float32: the dtype of weights and activations (the optimizer keeps fp32 masters). A CPU without bf16
    instructions multiplies bf16 in fp32, vLLM's whole forward included: float32 is then faster still."""
    attn_implementation: str = setting("auto", among=("auto", "eager", "sdpa", "flash_attention_2"))
    """auto (flash_attention_2 or sdpa on CUDA, eager on CPU, where it trains faster), eager, sdpa, flash_attention_2."""
    packing: bool = False
    """Lay sequences end to end instead of padding them (block-diagonal attention): the same results without computing padding."""
    compile: bool = False
    """torch.compile forwards and backwards: a minute or two in the first step, then faster ones. A later start takes half of it:
    compiled code stays in ~/.cache/nemo_style_rlhf, or in the folder that TORCHINDUCTOR_CACHE_DIR names."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    disable_dropout: bool = True
    """Turn dropout off in training (arXiv 2403.17031, detail 17): with it, the PPO ratio is not 1 before the first update."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    def validate(self) -> None:
        if self.lora.rank and self.lora.dropout and self.disable_dropout:
            raise UserError(
                f"model.lora.dropout={self.lora.dropout:g} needs model.disable_dropout=false, which is true: set it, or leave "
                "out the adapters' dropout"
            )
        require(
            not self.packing or self.attn_implementation == "auto",
            "model.attn_implementation",
            self.attn_implementation,
            "auto with model.packing=true, which has an attention of its own",
        )
        require(not (self.packing and self.compile), "model.compile", self.compile, "false with model.packing=true")


@dataclass
class OptimizerConfig:
    """AdamW."""

    lr: float = setting(1e-6, gt=0, expected="a number above 0")
    """Learning rate; the highest one if there is a schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: float = setting(1e-8, gt=0, expected="a number above 0")
    """1e-5 in arXiv 2403.17031 (detail 18)."""
    weight_decay: float = setting(0.0, ge=0, expected="a number from 0 up")
    """Decoupled weight decay, as a share of lr."""

    def validate(self) -> None:
        require(
            all(0 <= each < 1 for each in self.betas),
            "engine.optim.betas",
            self.betas,
            "two numbers from 0 up, below 1",
        )


@dataclass
class SchedulerConfig:
    """Learning rate over optimizer steps: linear warmup, then constant, linear or cosine decay."""

    name: str = setting("constant", among=("constant", "linear", "cosine"))
    """constant, linear or cosine."""
    warmup_steps: int = setting(0, ge=0, expected="a number of steps from 0 up")
    """Optimizer steps from 0 to the full learning rate."""
    total_steps: int = 0
    """Optimizer steps until the floor is reached (linear, cosine). With 0 the actor computes the number; a server needs it."""
    min_lr_ratio: float = setting(0.0, ge=0, le=1, expected="a share of lr, 0 to 1")
    """Floor of the decay, as a share of lr."""


def row_multiple(given: int | None, device_type: str) -> int:
    """The multiple of rows to which micro-batches are padded on a device; None for ``given`` leaves the choice."""
    return given or (8 if device_type == "cpu" else 1)


BUCKET_ELEMENTS = 5 * 10**8
"""Maximum number of gradient elements that DeepSpeed reduces at a time; a smaller model's gradients fit one bucket."""


@dataclass
class EngineConfig:
    """DeepSpeed, optimizer and micro-batching of one trained model."""

    zero_stage: int = setting(1, ge=0, le=3, expected="0, 1, 2 or 3")
    """0 to 3. On one rank, where there is nothing to shard, 0 takes the least memory and is no slower."""
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    gradient_clip_val: float = setting(1.0, ge=0, expected="a norm above 0, or 0 for none")
    """Global L2 norm to which the gradient is clipped; 0 turns clipping off."""
    micro_batch_tokens: int = setting(16384, gt=0, expected="a number of tokens above 0")
    """Maximum padded tokens (rows x longest row) of one forward and backward; a longer single sequence gets its own."""
    row_multiple: int | None = setting(None, gt=0, expected="a number of rows above 0, or null")
    """Rows of a micro-batch are padded to a multiple of this as far as micro_batch_tokens allows; null: 8 on a CPU, where small
    odd batches would use other matrix kernels, with other bits, and 1 on CUDA."""
    offload_optimizer_states: bool = False
    """Move optimizer states to host memory while the model is not training: zero_stage 0 to 2 (no effect on a CPU)."""
    offload_optimizer: bool = False
    """Keep optimizer states and fp32 masters in host memory, and step there (ZeRO-Offload, arXiv 2101.06840): zero_stage 1-3."""
    offload_parameters: bool = False
    """Keep the shards of the weights in host memory until a layer needs them (ZeRO-Infinity, arXiv 2104.07857): zero_stage 3."""
    zero_hpz_partition_size: int = 1
    """Number of neighboring ranks, the ranks of a node, that divide a second copy of the weights among themselves: zero_stage 3
    then gathers weights from other nodes once per optimizer step, not for every forward and backward (hpZ, arXiv 2306.10209). 1:
    no second copy."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Merged into the generated DeepSpeed config, for settings without a key here. For example {data_types: {grad_accum_dtype:
    fp32}} sums the bf16 gradients of many micro-batches without rounding in between: zero_stage 2 and 3."""

    def validate(self) -> None:
        require(
            self.zero_stage > 0 or not self.offload_optimizer,
            "engine.offload_optimizer",
            self.offload_optimizer,
            "false with engine.zero_stage=0",
        )
        require(
            self.zero_stage == 3 or not self.offload_parameters,
            "engine.offload_parameters",
            self.offload_parameters,
            "false without engine.zero_stage=3",
        )
        require(
            self.zero_hpz_partition_size == 1
            or (self.zero_hpz_partition_size > 1 and self.zero_stage == 3 and not self.offload_parameters),
            "engine.zero_hpz_partition_size",
            self.zero_hpz_partition_size,
            "1, or with engine.zero_stage=3 and engine.offload_parameters=false the ranks of a node",
        )
        require(
            not self.offload_optimizer_states or (self.zero_stage < 3 and not self.offload_optimizer),
            "engine.offload_optimizer_states",
            self.offload_optimizer_states,
            "false with engine.zero_stage=3, and with engine.offload_optimizer=true, which keeps them off the device",
        )

    def validate_with(self, model: ModelConfig) -> None:
        """Check that the engine can train ``model``; called by the process that trains it."""
        if self.zero_stage == 3 and model.lora.rank:
            raise UserError(
                f"engine.zero_stage=3 with model.lora.rank={model.lora.rank} would have to merge adapters that are sharded: "
                "use engine.zero_stage=2"
            )


@dataclass
class TokenConfig:
    """Source of a shared secret: a file or an environment variable, never the command line."""

    token_file: str | None = field(default=None, metadata={CHECK: existing_file})
    """A file that holds the token (its permissions are yours to set)."""
    token_env: str = "NSR_CRITIC_TOKEN"
    """The environment variable that holds the token when token_file is not set."""
