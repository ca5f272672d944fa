"""A trainer and a generator of one policy, in this process, as a run has them."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.generation.factory import weights_for_generator
from nemo_style_rlhf.generation.hf import HFGenerator
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.generation.seeds import sample_seed
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.generation.vllm import VLLMGenerator
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.lora import add_lora
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.sampler_check import Probe
from nemo_style_rlhf.rollout.logprobs import action_mask, batch_logprobs
from nemo_style_rlhf.rollout.types import Rollout
from nemo_style_rlhf.schema.common import EngineConfig, LoRAConfig, ModelConfig, OptimizerConfig
from nemo_style_rlhf.schema.generation import GenerationConfig

EOS = 0


class Pair:
    """A trainer and a generator of one policy."""

    def __init__(
        self, path: Path, device: torch.device, backend: str, temperature: float = 1.0, max_model_len: int = 40,
        lora: LoRAConfig | None = None, **generation: object,
    ):  # fmt: skip
        settings = {"max_length": 12, "kv_cache_gib": 0.1, **generation}
        self.config = GenerationConfig(backend=backend, temperature=temperature, **settings)
        model_config = ModelConfig(path=str(path), dtype="float32", trust_remote_code=True, lora=lora or LoRAConfig())
        hf = load_causal_lm(model_config)
        add_lora(hf, model_config)
        policy = PolicyModel(hf, temperature=temperature)
        self.engine = Engine(policy, EngineConfig(optim=OptimizerConfig(lr=0.02)), device=device)
        self.engine.eval()
        shapes = {name: tuple(tensor.shape) for name, tensor in self.weights()}
        self.generator: VLLMGenerator | HFGenerator
        if backend == "hf":
            model = load_causal_lm(model_config)
            self.generator = HFGenerator(model, self.config, device=device, eos_token_ids=[EOS], weight_shapes=shapes)
        else:
            self.generator = VLLMGenerator(
                str(path),
                self.config,
                dtype="float32",
                seed=0,
                max_model_len=max_model_len,
                eos_token_ids=[EOS],
                weight_shapes=shapes,
                trust_remote_code=True,
            )

    version = 0

    def weights(self):
        return weights_for_generator(self.engine.hf_weights(), self.engine.module.hf, self.config)

    def publish(
        self, weights: Iterable[tuple[str, Tensor]] | None = None, update: type[OwnWeights] = OwnWeights
    ) -> float:
        """Load the trainer's weights, or other ones under its name, into the generator; the gap on the probe."""
        self.version += 1
        weights = self.weights() if weights is None else weights
        return self.generator.load(update(self.version, weights, self.probe().target(self.engine)))

    def run(self, requests: list[GenerationRequest]) -> list[Completion]:
        stream = self.generator.stream(self.version)
        stream.submit(requests)
        return list(stream.completed())

    def sample(self, count=40, step=0) -> list[Completion]:
        samples = [SampleId(step, index % 5, index) for index in range(count)]
        prompts = [tuple(range(2 + index % 5, 12 + 2 * (index % 5))) for index in range(count)]
        completions = self.run(
            [GenerationRequest(s, p, sample_seed(7, s), self.config.max_length) for s, p in zip(samples, prompts)]
        )
        return sorted(completions, key=lambda completion: completion.request.sample)

    def gap(self, completions: list[Completion]) -> float:
        """The largest difference between the sampler's and the trainer's log-probabilities."""
        rollouts = [Rollout.from_completion(c, Prompt(0, list(c.request.prompt), "")) for c in completions]
        mask = action_mask(rollouts)
        tokens = torch.cat([rollout.tokens for rollout in rollouts])
        lengths = [len(rollout.tokens) for rollout in rollouts]
        trained = batch_logprobs(self.engine, tokens, lengths, mask, EngineConfig(), self.engine.device, Ranks())
        sampled = torch.cat([torch.cat([rollout.sampler_logprobs[1:], torch.zeros(1)]) for rollout in rollouts])
        return float((trained - sampled).abs().max())

    def train(self) -> None:
        """Move every weight, the embeddings of all tokens included."""
        ids = torch.arange(64).view(4, 16)
        mask = torch.ones(4, 16)
        mask[:, -1] = 0
        self.engine.backward(self.engine(ids, mask).logprobs.mean())
        self.engine.step()

    def probe(self) -> Probe:
        prompts = [Prompt(0, [3, 4, 5, 6], ""), Prompt(1, [7, 8, 9], "")]
        return Probe(prompts, 64, max_length=40, max_gap=1e-3)
