"""Rollouts of a tiny random policy, scored by rule."""

from concurrent.futures import Future

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.generation.hf import HFGenerator
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.rollout.experience import ExperienceBuilder
from nemo_style_rlhf.rollout.producer import Producer, Timers
from nemo_style_rlhf.rollout.reference import FrozenCopy
from nemo_style_rlhf.rollout.types import Experience, Rollout
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.common import EngineConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from nemo_style_rlhf.scoring.interface import Scores
from tests.support.models import SHAPE

CPU = torch.device("cpu")
PROMPTS = [Prompt(index, list(range(2, 4 + index)), f"prompt {index}", label=str(index)) for index in range(4)]


def rollout(prompt_length: int, response_length: int, finish_reason: str = "stop") -> Rollout:
    request = GenerationRequest(SampleId(1, 0, 0), tuple(range(prompt_length)), 5, 9)
    tokens = torch.arange(100, 100 + response_length)
    completion = Completion(request, tokens, -torch.arange(1.0, response_length + 1), finish_reason, 3)
    return Rollout.from_completion(completion, Prompt(0, list(range(prompt_length)), "text"))


class LengthScorer:
    """Scores a sequence by its number of tokens; values are all 0.5."""

    def score(self, samples):
        future = Future()
        lengths = [float(len(sample.tokens)) for sample in samples]
        future.set_result(Scores(rewards=torch.tensor(lengths), values=torch.full((int(sum(lengths)),), 0.5)))
        return future


class UnluckyScorer(LengthScorer):
    """Cannot score the first sample of a group."""

    def score(self, samples):
        scores = super().score(samples).result()
        scores.failed = torch.arange(len(samples)) == 0
        scores.rewards[0] = torch.nan
        future = Future()
        future.set_result(scores)
        return future


class Rollouts:
    """A producer and what makes experience of its batches."""

    def __init__(self, producer: Producer, builder: ExperienceBuilder) -> None:
        self.producer, self.builder = producer, builder
        self.algorithm = builder.algorithm

    def collect(self, take, *, step) -> Experience:
        self.producer.take = lambda position, count: take(count)
        return self.builder.build(self.producer.batch(step, 0, 0, Timers()), Timers())

    @property
    def kl_coef(self) -> float:
        return self.builder.state.kl_coef


def make_collector(max_length=6, stop=range(24), scorer=None, **algorithm):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # 24 of 64 tokens end a response, so both kinds of samples occur.
    config = GenerationConfig(backend="hf", max_length=max_length, stop_token_ids=list(stop))
    generator = HFGenerator(model, config, device=CPU, eos_token_ids=[], weight_shapes=shapes)
    engine = EngineConfig(row_multiple=1)
    policy = PolicyModel(model, temperature=1.0).eval()
    settings = AlgorithmConfig(num_rollout_samples=40, samples_per_prompt=10, **algorithm)
    reference = FrozenCopy(policy, engine, CPU, Ranks(), cpu_offload=False)
    producer = Producer(
        generator, scorer or LengthScorer(), lambda position, count: PROMPTS[:count], lambda prompt, response: str(response),
        settings, max_length, run_seed=3, ranks=Ranks(),
    )  # fmt: skip
    return Rollouts(producer, ExperienceBuilder(policy, reference, settings, engine, CPU, 1.0, Ranks()))


def collect(takes=None, **settings):
    def take(count):
        if takes is not None:
            takes.append(count)
        return PROMPTS[:count]

    return make_collector(**settings).collect(take, step=1)
