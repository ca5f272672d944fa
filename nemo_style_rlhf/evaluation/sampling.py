"""Generates responses of one checkpoint."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.data.encoding import decode_response
from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.evaluation.prompts import max_model_length
from nemo_style_rlhf.evaluation.samples import Sample
from nemo_style_rlhf.generation.factory import make_generator, require_host
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.rollout.producer import make_requests
from nemo_style_rlhf.schema.evaluation import Checkpoint, EvaluationConfig
from nemo_style_rlhf.schema.model_files import stop_ids


def sample(checkpoint: Checkpoint, config: EvaluationConfig, prompts: Sequence[Prompt]) -> list[Sample]:
    """``config.samples_per_prompt`` samples of every prompt, ordered by prompt and number."""
    by_vllm = config.generation.backend == "vllm"
    device = setup(config.run, samples=by_vllm)
    require_host(config.generation, device, repeatable=not by_vllm and config.run.repeatable(device.type))
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=config.model.trust_remote_code)
    requests = requests_for(prompts, config)
    generator = make_generator(
        config.model.at(checkpoint.path), config.generation, tokenizer=tokenizer, device=device, seed=config.run.seed,
        max_model_len=max_model_length(config, prompts), stop_strings=any(prompt.sampling.stop for prompt in prompts),
    )  # fmt: skip
    stream = generator.stream(0)
    stream.submit(requests)
    progress = track(
        stream.completed(),
        checkpoint.name,
        len(requests),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    completions = sorted(progress, key=lambda completion: completion.request.sample)
    generator.close()
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    ends = stop_ids(tokenizer) | {*config.generation.stop_token_ids} if config.reward.special_tokens else None
    return [
        _sample(completion, checkpoint, by_id[completion.request.sample.prompt_id], tokenizer, ends)
        for completion in completions
    ]


def requests_for(prompts: Sequence[Prompt], config: EvaluationConfig) -> list[GenerationRequest]:
    """Requests whose seeds depend only on ``run.seed``, prompt id and sample number."""
    return make_requests(
        prompts, step=0, samples_per_prompt=config.samples_per_prompt, max_tokens=config.generation.max_length,
        run_seed=config.run.seed,
    )  # fmt: skip


def _sample(
    completion: Completion, checkpoint: Checkpoint, prompt: Prompt, tokenizer: PreTrainedTokenizerBase,
    ends: frozenset[int] | None,
) -> Sample:  # fmt: skip
    request, token_ids = completion.request, completion.token_ids.tolist()
    return Sample(
        prompt_id=prompt.prompt_id,
        checkpoint=checkpoint.name,
        index=request.sample.index,
        seed=request.seed,
        prompt=prompt.text,
        response=decode_response(tokenizer, prompt.token_ids, token_ids, special_but=ends),
        length=len(token_ids),
        finish_reason=completion.finish_reason,
        label=prompt.label,
        metadata=prompt.metadata,
        chat=prompt.chat,
        token_ids=(*prompt.token_ids, *token_ids),
    )
