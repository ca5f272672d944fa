"""Responses of one checkpoint, made in a process of its own: when it ends, every byte of memory is given back, which no
engine promises of its shutdown."""

import multiprocessing
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch
from rich.console import Console
from rich.progress import track
from transformers import GenerationConfig as HFGenerationConfig
from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import decode_response
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.evaluation.prompts import max_model_length
from nemo_style_rlhf.evaluation.samples import Sample
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, Generator, SampleId, sample_seed
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.cpu_linear import matmul_dtype
from nemo_style_rlhf.models.loading import eos_token_ids, load_causal_lm, load_tokenizer
from nemo_style_rlhf.schema.common import ModelConfig
from nemo_style_rlhf.schema.evaluation import Checkpoint, EvaluationConfig
from nemo_style_rlhf.scoring.worker import end_with_parent


def sample_in_child(checkpoint: Checkpoint, config: EvaluationConfig, prompts: Sequence[Prompt]) -> list[Sample]:
    """:func:`sample` in a fresh process, which has ended when this returns.

    Raises:
        UserError: the checkpoint cannot be loaded, or the process was killed.
    """
    # Spawned, not forked: a CUDA context and threads do not survive a fork.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_watch_parent) as executor:
        try:
            return executor.submit(sample, checkpoint, config, prompts).result()
        except BrokenProcessPool as error:
            raise UserError(
                f"the process that generated with {checkpoint.path} was killed, most often for lack of memory: lower "
                "generation.max_num_seqs, generation.kv_cache_gib or generation.gpu_memory_utilization"
            ) from error


def sample(checkpoint: Checkpoint, config: EvaluationConfig, prompts: Sequence[Prompt]) -> list[Sample]:
    """Of every prompt ``config.samples_per_prompt`` samples, ordered by prompt and number."""
    device = setup(config.run)
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=config.model.trust_remote_code)
    requests = requests_for(prompts, config)
    generator = _generator(checkpoint, config, prompts, tokenizer, device)
    generator.submit(requests)
    progress = track(
        generator.completed(),
        checkpoint.name,
        len(requests),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    completions = sorted(progress, key=lambda completion: completion.request.sample)
    generator.close()
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    return [
        _sample(completion, checkpoint, by_id[completion.request.sample.prompt_id], tokenizer)
        for completion in completions
    ]


def requests_for(prompts: Sequence[Prompt], config: EvaluationConfig) -> list[GenerationRequest]:
    """Their seeds depend on ``run.seed``, prompt id and sample number alone."""
    requests = []
    for prompt in prompts:
        limit = min(config.generation.max_length, prompt.sampling.max_length or config.generation.max_length)
        for index in range(config.samples_per_prompt):
            identity = SampleId(0, prompt.prompt_id, index)
            seed = sample_seed(config.run.seed, identity)
            requests.append(GenerationRequest(identity, tuple(prompt.token_ids), seed, limit, sampling=prompt.sampling))
    return requests


def _watch_parent() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()


def _sample(
    completion: Completion, checkpoint: Checkpoint, prompt: Prompt, tokenizer: PreTrainedTokenizerBase
) -> Sample:
    request = completion.request
    return Sample(
        prompt_id=prompt.prompt_id,
        checkpoint=checkpoint.name,
        index=request.sample.index,
        seed=request.seed,
        prompt=prompt.text,
        response=decode_response(tokenizer, prompt.token_ids, completion.token_ids),
        length=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        label=prompt.label,
        token_ids=(*prompt.token_ids, *completion.token_ids),
    )


def _generator(
    checkpoint: Checkpoint,
    config: EvaluationConfig,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> Generator:
    """One whose weights stay as they are: no transfer ever comes."""
    model_config = config.model.at(checkpoint.path)
    if config.generation.backend == "hf":
        from nemo_style_rlhf.generation.hf import HFGenerator

        model = load_causal_lm(model_config)
        eos = eos_token_ids(model.generation_config, tokenizer)
        return HFGenerator(model, config.generation, device=device, eos_token_ids=eos, weight_shapes={})
    from nemo_style_rlhf.generation.vllm import VLLMGenerator

    return VLLMGenerator(
        checkpoint.path,
        config.generation,
        dtype=str(_vllm_dtype(model_config.dtype, device)).removeprefix("torch."),
        seed=config.run.seed,
        max_model_len=max_model_length(config, prompts),
        eos_token_ids=eos_token_ids(_generation_config(model_config), tokenizer),
        weight_shapes={},
        trust_remote_code=model_config.trust_remote_code,
        stop_strings=any(prompt.sampling.stop for prompt in prompts),
    )


def _vllm_dtype(dtype: str, device: torch.device) -> torch.dtype:
    return matmul_dtype(torch.empty(0, dtype=getattr(torch, dtype), device=device))


def _generation_config(config: ModelConfig) -> HFGenerationConfig | None:
    """Without ``generation_config.json`` the ids in ``config.json``, as transformers does when it loads the model."""
    from transformers import AutoConfig

    try:
        return HFGenerationConfig.from_pretrained(config.path)
    except OSError:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        return HFGenerationConfig.from_model_config(hf_config)
