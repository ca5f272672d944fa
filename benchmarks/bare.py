"""Bare compute: the parts of a PPO step without PPO, server, protocol or DeepSpeed; prints one JSON line of seconds.

    .venv-actor/bin/python benchmarks/bare.py --models outputs/benchmarks/models/19m

Everything runs alone on the machine, on sequences of the benchmark's shape. What a phase of benchmarks/ppo_step.py takes
beyond the sum of its parts here is overhead: of streaming, DeepSpeed, HTTP, and of two processes sharing the cores. The parts
named ``..._products`` are the lower bound of each: its matrix products with weights and nothing else.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.generation.interface import GenerationRequest, ProbeTarget, SampleId
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.generation.vllm import VLLMGenerator
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.compiled import compile_forward
from nemo_style_rlhf.models.cpu_linear import matmul_dtype
from nemo_style_rlhf.models.loading import load_causal_lm, load_tokenizer
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.models.scalar_loading import load_scalar_model
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig

NO_PROBE = ProbeTarget(((0, 1),), (torch.zeros(1),), max_gap=float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder made by benchmarks/models.py")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    init_distributed(setup(RunConfig(output_dir="", num_threads=arguments.threads)))
    policy_config = ModelConfig(str(arguments.models / "policy"), dtype=arguments.dtype, compile=arguments.compile)
    policy = PolicyModel(load_causal_lm(policy_config), temperature=1.0, compile_backbone=arguments.compile)
    critic = load_scalar_model(ModelConfig(str(arguments.models / "reward"), dtype=arguments.dtype))
    if arguments.compile:
        compile_forward(critic)
    prompts = read_prompts(arguments.models, arguments.samples)
    generator = vllm_generator(arguments, policy)
    batch = Batch(prompts, arguments.response_length, arguments.mini_batches)
    measured = {
        **generation(generator, prompts, arguments),
        **transfer(generator, policy, arguments.repeats),
        **compute("policy", policy, batch.policy_inputs, lambda output: output.logprobs, arguments.repeats),
        **compute("critic", critic, batch.critic_inputs, lambda output: output, arguments.repeats),
        **products(policy, critic, len(prompts[0]), arguments),
    }
    generator.close()
    print(json.dumps(measured))


class Batch:
    """Sequences of the benchmark's shape, in the mini-batches of one update."""

    def __init__(self, prompts: Sequence[Sequence[int]], response_length: int, mini_batches: int) -> None:
        start = len(prompts[0])
        response = torch.randint(
            len(prompts), (len(prompts), response_length), generator=torch.Generator().manual_seed(0)
        )
        self._tokens = torch.cat([torch.tensor(prompts), response], dim=1)
        positions = torch.arange(self._tokens.shape[1])
        actions = (positions >= start - 1) & (positions < self._tokens.shape[1] - 1)
        self._action_mask = actions.float().expand(len(prompts), -1)
        self._parts = mini_batches

    def policy_inputs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._tokens.chunk(self._parts), self._action_mask.chunk(self._parts), strict=True))

    def critic_inputs(self) -> list[tuple[Tensor, Tensor]]:
        return [(tokens, torch.ones_like(tokens)) for tokens in self._tokens.chunk(self._parts)]


def generation(
    generator: VLLMGenerator, prompts: Sequence[Sequence[int]], arguments: argparse.Namespace
) -> dict[str, float]:
    """Compare vLLM's own `generate`, without seeds and log-probabilities, with our stream of requests, which has both."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=arguments.response_length, ignore_eos=True, detokenize=False)
    inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]

    def bare() -> None:
        generator._llm.generate(inputs, params, use_tqdm=False)

    def streamed() -> None:
        stream = generator.stream(0)
        stream.submit(requests_of(prompts, arguments.response_length))
        assert sum(1 for _ in stream.completed()) == len(prompts)

    return alternate({"generate_bare": bare, "generate_streamed": streamed}, arguments.repeats)


def transfer(generator: VLLMGenerator, policy: PolicyModel, repeats: int) -> dict[str, float]:
    """Compare vLLM's own `reload_weights` with our transfer, which verifies a digest."""
    versions = iter(range(1, 10**6))

    def weights() -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in policy.hf.state_dict().items())

    def bare() -> None:
        reload_weights(generator, weights())

    def verified() -> None:
        generator.load(OwnWeights(next(versions), weights(), NO_PROBE))

    return alternate({"reload_weights_bare": bare, "transfer_verified": verified}, 2 * repeats)


def reload_weights(generator: VLLMGenerator, weights: Iterable[tuple[str, Tensor]]) -> None:
    """vLLM's own reload, without our checks."""
    generator._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def compute(
    name: str,
    model: nn.Module,
    inputs: Callable[[], list[tuple[Tensor, Tensor]]],
    output: Callable[[Any], Tensor],
    repeats: int,
) -> dict[str, float]:
    """Measure the forward of the whole rollout without gradient, and forward and backward of all its mini-batches."""

    @torch.no_grad()
    def forward() -> None:
        for each in inputs():
            model(*each)

    def forward_backward() -> None:
        for each in inputs():
            output(model(*each)).mean().backward()
            model.zero_grad()

    functions = {f"{name}_forward": forward, f"{name}_forward_backward": forward_backward}
    return alternate(functions, repeats)


def products(
    policy: PolicyModel, critic: nn.Module, prompt_length: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Seconds of the plain matrix products with weights in each part, each timed alone in the dtype that the parts use."""
    samples, responses, parts = arguments.samples, arguments.samples * arguments.response_length, arguments.mini_batches
    tokens = samples * prompt_length + responses
    layers, scored = linear_layers(policy.hf.base_model), linear_layers(critic)
    head = [(policy.hf.lm_head.out_features, policy.hf.lm_head.in_features)]
    dtype = matmul_dtype(policy.hf.lm_head.weight)

    @cache
    def product(rows: int, out_features: int, in_features: int, *, backward: bool) -> float:
        inputs, gradients = torch.randn(rows, in_features, dtype=dtype), torch.randn(rows, out_features, dtype=dtype)
        weight = torch.randn(out_features, in_features, dtype=dtype)
        kinds = {"forward": lambda: inputs @ weight.T}
        if backward:
            kinds |= {"of input": lambda: gradients @ weight, "of weight": lambda: gradients.T @ inputs}
        return sum(alternate(kinds, arguments.repeats).values())

    def of(layers: list[tuple[int, int]], rows: int, *, backward: bool = False) -> float:
        return sum(product(rows, *layer, backward=backward) for layer in layers)

    return {
        "generate_products": of(layers, samples * prompt_length)
        + (arguments.response_length - 1) * of(layers, samples)
        + arguments.response_length * of(head, samples),
        "policy_forward_products": of(layers, tokens) + of(head, responses),
        "critic_forward_products": of(scored, tokens),
        "policy_forward_backward_products": parts
        * (of(layers, tokens // parts, backward=True) + of(head, responses // parts, backward=True)),
        "critic_forward_backward_products": parts * of(scored, tokens // parts, backward=True),
    }


def linear_layers(model: nn.Module) -> list[tuple[int, int]]:
    """Outputs and inputs of each linear layer."""
    return [(layer.out_features, layer.in_features) for layer in model.modules() if isinstance(layer, nn.Linear)]


def alternate(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function, called in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def vllm_generator(arguments: argparse.Namespace, policy: PolicyModel) -> VLLMGenerator:
    return VLLMGenerator(
        str(arguments.models / "policy"),
        GenerationConfig(max_length=arguments.response_length, ignore_eos=True),
        dtype=str(matmul_dtype(policy.hf.lm_head.weight)).removeprefix("torch."),
        seed=0,
        max_model_len=128 + arguments.response_length,
        eos_token_ids=[],
        weight_shapes={name: tuple(tensor.shape) for name, tensor in policy.hf.state_dict().items()},
    )


def requests_of(prompts: Sequence[Sequence[int]], response_length: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(SampleId(1, index, 0), tuple(prompt), index, response_length)
        for index, prompt in enumerate(prompts)
    ]


def read_prompts(models: Path, samples: int) -> list[list[int]]:
    tokenizer = load_tokenizer(str(models / "policy"))
    rows = (models / "prompts.jsonl").read_text().splitlines()[:samples]
    return [list(tokenizer(json.loads(row)["prompt"])["input_ids"]) for row in rows]


if __name__ == "__main__":
    main()
