"""Real vLLM beside real DeepSpeed in one process: it samples from the trainer's policy, and knows when it does not."""

import gc
import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation import cpu_kernels
from nemo_style_rlhf.generation import vllm as vllm_generator
from nemo_style_rlhf.generation.factory import keeping_threads
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId, TransferError
from nemo_style_rlhf.generation.seeds import sample_seed
from nemo_style_rlhf.generation.self_check import loses_bits
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.generation.vllm import VLLMGenerator, explain
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.models.export import export_model
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.rollout.producer import Producer, Timers
from nemo_style_rlhf.schema.algorithm import AlgorithmConfig
from nemo_style_rlhf.schema.common import ModelConfig, RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig
from nemo_style_rlhf.scoring.interface import Scores, ScoringSample
from tests.support.models import save_policy, save_policy_with_code
from tests.support.sampler_pair import EOS, Pair


@pytest.fixture(scope="module")
def device():
    """Two threads, whatever the other tests have: a sample's bits may not depend on how they share the work."""
    device = setup(RunConfig(output_dir="unused", device="cpu", num_threads=2))
    init_distributed(device)
    yield device
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllms_own_kernels_compute_what_its_operations_in_torch_do(device, dtype):
    assert cpu_kernels.register() == {name: ["cpu_c", "native"] for name in ("rms_norm", "fused_add_rms_norm")}
    from vllm import ir

    x, residual, weight = torch.randn(7, 96, dtype=dtype), torch.randn(7, 96, dtype=dtype), torch.rand(96, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    rms_norm, fused = ir.ops.rms_norm.impls, ir.ops.fused_add_rms_norm.impls
    plain = [rms_norm[provider].impl_fn(x, weight, 1e-6) for provider in ("native", "cpu_c")]
    torch.testing.assert_close(*plain, **tolerance)
    both = [fused[provider].impl_fn(x.clone(), residual.clone(), weight, 1e-6) for provider in ("native", "cpu_c")]
    torch.testing.assert_close(*both, **tolerance)


def test_a_gpu_with_too_little_free_is_told_what_to_lower(device):
    """In the words of vLLM itself, which without a GPU only its check of one can be asked for."""
    from vllm.v1.worker.utils import request_memory

    free = SimpleNamespace(device_="cuda:0", free_memory=10 * 2**30, total_memory=80 * 2**30)
    with pytest.raises(ValueError, match="less than desired") as refused:
        request_memory(free, SimpleNamespace(gpu_memory_utilization=0.5))
    explained = explain(refused.value, "policy", GenerationConfig(gpu_memory_utilization=0.5), max_model_len=64)
    assert isinstance(explained, UserError)
    assert str(explained) == (
        "generation.gpu_memory_utilization=0.5 is more than is free for vLLM (Free memory on device cuda:0 (10.0/80.0 GiB) on "
        "startup is less than desired GPU memory utilization (0.5, 40.0 GiB)): lower it, or end what else runs there"
    )


class StandIn:
    """For vLLM's LLM where there is no GPU: notes what it is given, and leaves one thread, as vLLM does there."""

    given: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        StandIn.given = given
        self.llm_engine = None
        torch.set_num_threads(1)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_what_vllm_is_told_on_a_gpu(graphs, invariant, device, monkeypatch):
    import vllm

    assert torch.get_num_threads() == 2
    monkeypatch.setattr(vllm, "LLM", StandIn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_generator, "init_alone", lambda _: None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    config = GenerationConfig(enforce_eager=not graphs)
    settings = {"dtype": "float32", "seed": 0, "max_model_len": 40, "eos_token_ids": [EOS], "weight_shapes": {}}
    with keeping_threads(torch.device("cuda")):
        VLLMGenerator("policy", config, **settings, sleeps=True)
    assert (os.environ["TRITON_F32_DEFAULT"], os.environ["VLLM_USE_FLASHINFER_SAMPLER"]) == ("ieee", "0")
    given = StandIn.given
    assert torch.get_num_threads() == 2  # an optimizer in host memory computes with them
    assert given["enforce_eager"] == (not graphs) and given["sleep_mode_offload_cudagraph"] == graphs
    assert given["enable_sleep_mode"] and given["attention_backend"] == ("TRITON_ATTN" if invariant else None)


def test_a_generator_that_ends_or_is_freed_leaves_the_trainer_its_process_group(tmp_path, device):
    first, second = (Pair(save_policy(tmp_path), device, "vllm") for _ in range(2))
    first.generator.close()
    first.train()
    del second.generator
    gc.collect()
    second.train()
    third = Pair(tmp_path, device, "vllm")
    assert third.gap(third.sample()) < 1e-3


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_sampler_and_trainer_agree_after_every_transfer(tmp_path, device, backend, temperature, tied):
    pair = Pair(save_policy(tmp_path, tie_word_embeddings=tied), device, backend, temperature)
    for step in range(3):
        assert pair.gap(pair.sample(step=step)) < 1e-3
        pair.train()
        assert pair.gap(pair.sample(step=step)) > 1e-2  # the old weights are recognisable
        assert pair.publish() < 1e-3
    assert pair.gap(pair.sample(step=9)) < 1e-3


def test_a_model_that_comes_with_code_trains_generates_and_is_exported(tmp_path, device):
    path = save_policy_with_code(tmp_path / "policy")
    with pytest.raises(UserError, match=r"custom code .* to correctly load"):
        load_causal_lm(ModelConfig(path=str(path)))
    pair = Pair(path, device, "vllm")
    pair.train()
    pair.publish()
    assert pair.gap(pair.sample()) < 1e-3
    export_model(pair.engine.module.hf, tmp_path / "export", source=str(path), trust_remote_code=True)
    again = load_causal_lm(ModelConfig(path=str(tmp_path / "export"), dtype="float32", trust_remote_code=True))
    assert torch.equal(again.lm_head.weight, pair.engine.module.hf.lm_head.weight)


@pytest.fixture(scope="module")
def vllm_pair(tmp_path_factory, device):
    return Pair(save_policy(tmp_path_factory.mktemp("policy")), device, "vllm")


def test_the_process_that_trains_and_samples_listens_on_no_port(vllm_pair):
    vllm_pair.train()
    assert [each for each in psutil.Process().net_connections() if each.status == "LISTEN"] == []


def test_samples_depend_on_their_seeds_not_on_who_runs_beside_them(vllm_pair):
    forty, again, eight = vllm_pair.sample(40), vllm_pair.sample(40), vllm_pair.sample(8)
    together = {completion.request.sample: completion for completion in forty}
    assert all(same_bits(completion, together[completion.request.sample]) for completion in [*again, *eight])
    assert len({tuple(completion.token_ids.tolist()) for completion in forty}) > 30


def test_long_samples_keep_their_bits_in_every_way_that_engines_may_make_them(tmp_path, device):
    pair = Pair(save_policy(tmp_path), device, "vllm", max_model_len=60)
    preempted = preempted_prompts(pair.generator)
    assert not loses_bits(pair.generator, [[5, 6, 7, 8], [9, 10, 11]], 0, thorough=60)
    assert preempted


def same_bits(one: Completion, other: Completion) -> bool:
    return torch.equal(one.token_ids, other.token_ids) and torch.equal(one.logprobs, other.logprobs)


SCHEDULERS = {
    "4096 tokens a step": {"kv_cache_gib": 1},
    "200 tokens a step, fewer than most prompts": {
        "kv_cache_gib": 1,
        "max_num_batched_tokens": 200,
        "max_num_seqs": 64,
    },
    "a cache that preempts": {"kv_cache_gib": 0.03},
    "a small step and a smaller cache": {"kv_cache_gib": 0.004, "max_num_batched_tokens": 64, "max_num_seqs": 64},
}
PROMPTS = 192
LONGER_THAN_ANY_BLOCK = 6000
"""Tokens of a prompt whose keys attention would read in blocks of different lengths, however large a processor's cache is."""


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_sample_has_the_bits_of_one_generated_alone_however_vllm_splits_and_preempts(tmp_path, device, scheduler):
    settings = SCHEDULERS[scheduler]
    policy = save_policy(tmp_path, max_position_embeddings=1024)
    pair = Pair(policy, device, "vllm", max_model_len=1000, max_length=64, **settings)
    generator, rng = pair.generator, random.Random(0)
    prompts = [tuple(rng.choices(range(1, 64), k=rng.randint(20, 900))) for _ in range(PROMPTS)]
    samples = [SampleId(1, number, 0) for number in range(len(prompts))]
    requests = [GenerationRequest(s, p, sample_seed(7, s), 64) for s, p in zip(samples, prompts, strict=True)]
    preempted = preempted_prompts(generator)
    together = {completion.request.sample: completion for completion in pair.run(requests)}
    assert len(together) == PROMPTS and len({tuple(c.token_ids.tolist()) for c in together.values()}) > 0.9 * PROMPTS
    assert (len(preempted) > 0) == (settings["kv_cache_gib"] < 1)
    for number in [*rng.sample(range(PROMPTS), 12), *sorted(preempted)[:12]]:
        (alone,) = pair.run([requests[number]])
        assert same_bits(together[alone.request.sample], alone)
    assert pair.publish() < 1e-3


def test_a_long_prompt_has_the_same_bits_alone_and_in_parts(tmp_path, device):
    policy = save_policy(tmp_path, max_position_embeddings=8192)
    pair = Pair(policy, device, "vllm", max_model_len=8192, max_length=8, kv_cache_gib=1, max_num_batched_tokens=2048)
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(1, 64), k=LONGER_THAN_ANY_BLOCK + 100 * number)) for number in range(3)]
    samples = [SampleId(1, number, 0) for number in range(len(prompts))]
    requests = [GenerationRequest(s, p, sample_seed(7, s), 8) for s, p in zip(samples, prompts, strict=True)]
    together = {completion.request.sample: completion for completion in pair.run(requests)}
    assert all(same_bits(together[request.sample], *pair.run([request])) for request in requests)


def preempted_prompts(generator: VLLMGenerator) -> set[int]:
    """Grows by the prompt of every request that vLLM preempts from now on."""
    scheduler = generator._engine.engine_core.engine_core.scheduler
    preempted, preempt = set[int](), scheduler._preempt_request

    def note(request: Any, *args: object, **kwargs: object) -> None:
        preempted.add(int(request.request_id.split("/")[2]))
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = note
    return preempted


def test_completions_stream_out_with_reason_and_version(vllm_pair):
    for completion in vllm_pair.sample(40):
        ended = completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 12
        assert EOS not in completion.token_ids[:-1]
        assert completion.weights_version == vllm_pair.version
    assert {c.finish_reason for c in vllm_pair.sample(40)} == {"stop", "length"}


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_streams_see_their_own_samples_and_weights_wait_for_all(tmp_path, device, backend):
    pair = Pair(save_policy(tmp_path), device, backend, max_num_seqs=8)
    requests = [GenerationRequest(SampleId(0, index, 0), (3, 4 + index), index, 5) for index in range(20)]
    alone = {completion.request.sample: completion.token_ids.tolist() for completion in pair.run(requests)}
    first, second = pair.generator.stream(0), pair.generator.stream(0)
    first.submit(requests[:10])
    second.submit(requests[10:])
    with pytest.raises(TransferError, match="20 requests are running"):
        pair.publish()
    mine = {completion.request.sample: completion.token_ids.tolist() for completion in first.completed()}
    assert mine == {request.sample: alone[request.sample] for request in requests[:10]}
    third = pair.generator.stream(0)
    third.submit(requests[:3])
    third.close()  # abandons them
    theirs = {completion.request.sample: completion.token_ids.tolist() for completion in second.completed()}
    assert theirs == {request.sample: alone[request.sample] for request in requests[10:]}
    pair.version = 0
    pair.train()
    assert pair.publish() < 1e-3
    with pytest.raises(TransferError, match="samples of weights version 0 were asked for, the generator holds 1"):
        pair.generator.stream(0)
    assert pair.gap(pair.sample()) < 1e-3


def test_a_prefix_cache_that_stays_is_refused(tmp_path, device):
    """vLLM keeps it while a request runs, and only warns: weights would be new, keys and values old."""
    pair = Pair(save_policy(tmp_path), device, "vllm")
    stream = pair.generator.stream(0)
    stream.submit([GenerationRequest(SampleId(0, 0, 0), (3, 4), 1, 12)])
    pair.generator.step()
    pair.generator._owners.clear()  # as if nobody knew of the request
    with pytest.raises(TransferError, match="did not drop its prefix cache"):
        pair.publish()


DAMAGE = {
    r"1 tensors are missing, model\.norm\.weight": lambda weights: [w for w in weights if w[0] != "model.norm.weight"],
    r"model\.norm\.bias is unknown": lambda weights: [("model.norm.bias", weights[0][1]), *weights],
    r"model\.norm\.weight arrived twice": lambda weights: [
        *weights,
        *(w for w in weights if w[0] == "model.norm.weight"),
    ],
    r"has shape \(5, 64\), expected \(64, 64\)": lambda weights: [(weights[0][0], weights[0][1][:5]), *weights[1:]],
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_transfer_that_is_not_whole_is_refused(tmp_path, device, message):
    pair = Pair(save_policy(tmp_path), device, "vllm")
    with pytest.raises(TransferError, match=message):
        pair.publish(DAMAGE[message](list(pair.weights())))


class Damaged(OwnWeights):
    """Flips a bit of one tensor on the way."""

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        for bucket in super().buckets():
            name, tensor = bucket[0]
            damaged = tensor.clone()
            damaged.view(-1).view(torch.int32)[3] ^= 1
            yield [(name, damaged), *bucket[1:]]


@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_a_tensor_damaged_on_the_way_is_caught_by_the_digest(tmp_path, device, backend):
    pair = Pair(save_policy(tmp_path), device, backend)
    with pytest.raises(TransferError, match="stale or damaged"):
        pair.publish(update=Damaged)


def publish_one_stale(pair: Pair, stale: str) -> None:
    old = {name: tensor.clone() for name, tensor in pair.weights()}
    pair.train()
    pair.publish([(name, old[name] if name == stale else tensor) for name, tensor in pair.weights()])


@pytest.mark.parametrize(
    "stale",
    ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"],
)
def test_a_tensor_the_trainer_sends_stale_is_caught_by_the_probe(vllm_pair, stale):
    with pytest.raises(TransferError, match="does not hold the trainer's weights"):
        publish_one_stale(vllm_pair, stale)
    assert vllm_pair.publish() < 1e-3


def test_a_stale_head_of_a_tied_model_is_caught_by_the_probe(tmp_path, device):
    pair = Pair(save_policy(tmp_path, tie_word_embeddings=True), device, "vllm")
    with pytest.raises(TransferError, match="does not hold the trainer's weights"):
        publish_one_stale(pair, "lm_head.weight")


class RecordingScorer:
    """Answers at once and notes how many samples were still being decoded when a group was handed in."""

    def __init__(self, generator: VLLMGenerator) -> None:
        self._engine = generator._engine
        self.groups: list[tuple[list[list[int]], int]] = []

    def score(self, samples: list[ScoringSample]) -> Future:
        tokens = [sample.tokens.tolist() for sample in samples]
        self.groups.append((tokens, self._engine.get_num_unfinished_requests()))
        future: Future = Future()
        future.set_result(Scores(torch.zeros(len(samples))))
        return future


def test_a_group_is_scored_while_others_are_still_decoded(tmp_path, device):
    pair = Pair(save_policy(tmp_path), device, "vllm", max_num_seqs=32)
    scorer = RecordingScorer(pair.generator)
    prompts = [Prompt(index, [2 + index % 60, 3], "") for index in range(128)]
    producer = Producer(
        pair.generator, scorer, lambda position, count: prompts[:count], lambda prompt, response: str(response),
        AlgorithmConfig(num_rollout_samples=128), 12, run_seed=1, ranks=Ranks(),
    )  # fmt: skip
    batch = producer.batch(1, 0, 0, Timers())
    rollouts = batch.rollouts
    assert len(batch.scores.result().rewards) == batch.data_end == 128
    assert len(scorer.groups) == 4
    assert [unfinished for _, unfinished in scorer.groups[:3]] == sorted(
        (unfinished for _, unfinished in scorer.groups[:3]), reverse=True
    )
    assert scorer.groups[0][1] > 0
    # Groups are neighbours in request order, whoever finished first.
    expected = [[rollout.tokens.tolist() for rollout in rollouts[start : start + 32]] for start in range(0, 128, 32)]
    assert sorted(tokens for tokens, _ in scorer.groups) == sorted(expected)
