"""Chooses the generator of a process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import GenerationConfig as HFGenerationConfig

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.hf import HFGenerator
from nemo_style_rlhf.generation.interface import Generator
from nemo_style_rlhf.generation.vllm_imports import import_vllm
from nemo_style_rlhf.launch.gpu_host import require_compiler
from nemo_style_rlhf.models.cpu_linear import matmul_dtype
from nemo_style_rlhf.models.loading import eos_token_ids, load_causal_lm
from nemo_style_rlhf.models.published import as_published, require_sendable
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.generation import GenerationConfig

log = logging.getLogger(__name__)
LATENT_WITH_HEADS = ("minicpm3",)
"""Model types with latent attention that vLLM computes as ordinary heads."""


def make_generator(
    model: ModelConfig, config: GenerationConfig, *, tokenizer: PreTrainedTokenizerBase, device: torch.device, seed: int,
    max_model_len: int, weight_shapes: dict[str, tuple[int, ...]] | None = None, stop_strings: bool = False,
    sleeps: bool = False,
) -> Generator:  # fmt: skip
    """A generator of the checkpoint ``model.path``, in this process.

    Args:
        weight_shapes: the tensors that every update must bring; None for a generator whose weights never change.
        stop_strings: True if prompts have their own stop strings.
        sleeps: True if :meth:`Generator.sleep` will be called.

    Raises:
        UserError: the backend cannot run the model, or does not support stop strings.
    """
    eos, shapes = eos_token_ids(_generation_config(model), tokenizer), weight_shapes or {}
    if config.backend == "hf":
        if stop_strings:
            raise UserError("generation.backend=hf knows no stop strings, but prompts bring their own: use vllm")
        # No packing: batches of the hf backend are padded on the left and grow token by token.
        whole = load_causal_lm(replace(model, packing=False))
        return HFGenerator(whole, config, device=device, eos_token_ids=eos, weight_shapes=shapes)
    # Not at the top: importing vLLM takes seconds, and the hf backend does not need it.
    import_vllm(compiles=config.compiles)
    from nemo_style_rlhf.generation.vllm import VLLMGenerator

    dtype = matmul_dtype(torch.empty(0, dtype=getattr(torch, model.dtype), device=device))
    return VLLMGenerator(
        model.path, config, dtype=str(dtype).removeprefix("torch."), seed=seed, max_model_len=max_model_len,
        eos_token_ids=eos, weight_shapes=shapes, stop_strings=stop_strings, trust_remote_code=model.trust_remote_code,
        sleeps=sleeps,
    )  # fmt: skip


def require_host(config: GenerationConfig, device: torch.device, *, repeatable: bool = False) -> None:
    """Check the host for what vLLM needs, before models are loaded, and log settings that would be faster.

    Args:
        repeatable: True if this process must compute to the bit what another would.

    Raises:
        UserError: something is missing.
    """
    if device.type != "cuda":
        return
    if repeatable and config.backend == "vllm":
        raise UserError(
            "run.deterministic=true needs generation.engines.count=1 or more on a GPU, and placement.share=turns where there is "
            "only one: in the trainer's process, vLLM's repeatable kernels would replace the trainer's"
        )
    if repeatable and config.top_p < 1:
        raise UserError(
            f"run.deterministic=true does not support generation.top_p={config.top_p:g} with generation=hf on a GPU, where "
            "cumulative sums do not repeat: give generation.top_p=1, or engines (generation.engines.count=1)"
        )
    if config.backend == "hf":
        return
    require_compiler()
    if config.enforce_eager is None:
        log.info(
            "vLLM runs without CUDA graphs: generation.enforce_eager=false decodes faster, after a start that takes longer"
        )


@contextmanager
def keeping_threads(device: torch.device) -> Iterator[None]:
    """Context that keeps the number of torch's threads while a generator is made in the trainer's process: on a GPU vLLM sets one
    thread, but an optimizer in host memory computes with all of them."""
    threads = torch.get_num_threads()
    yield
    if device.type == "cuda":
        torch.set_num_threads(threads)


def load_libraries(config: GenerationConfig) -> None:
    """Import the modules that :func:`make_generator` imports, in a process that will fork."""
    if config.backend == "vllm":
        import_vllm(compiles=config.compiles)


def require_supported(hf: PreTrainedModel, path: str, config: GenerationConfig) -> None:
    """Check a model for faults that a generator would report only after its start.

    Raises:
        UserError: the backend cannot sample from ``hf``, or take its weights.
    """
    if config.backend == "hf":
        return
    text = hf.config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None) is not None and text.model_type not in LATENT_WITH_HEADS
    if latent and not torch.cuda.is_available():
        raise UserError(
            f"{path} ({type(hf).__name__}) has multi-head latent attention (kv_lora_rank in its config.json), for which vLLM on "
            "CPUs has no kernel: use generation.backend=hf"
        )
    require_sendable(hf, path)


def weights_for_generator(
    weights: Iterator[tuple[str, Tensor]], hf: PreTrainedModel, config: GenerationConfig
) -> Iterator[tuple[str, Tensor]]:
    """The ``weights`` of ``hf`` under the names by which the generator loads them."""
    return weights if config.backend == "hf" else as_published(weights, hf)


def _generation_config(model: ModelConfig) -> HFGenerationConfig | None:
    """The model's ``generation_config.json``; without it, the ids in ``config.json``, as when transformers loads the model."""
    try:
        return HFGenerationConfig.from_pretrained(model.path)
    except OSError:
        hf_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        return HFGenerationConfig.from_model_config(hf_config)
