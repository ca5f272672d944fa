"""Real generation engines, each a process of its own behind a front door: they sample what a generator in this process does."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.memory_use import held_bytes
from nemo_style_rlhf.engine.process_group import init_distributed
from nemo_style_rlhf.engines.client import EngineClient
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, SampleId, TransferError
from nemo_style_rlhf.generation.seeds import sample_seed
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.generation.vllm import VLLMGenerator
from nemo_style_rlhf.generation.weight_store import PublishedWeights, WeightStore
from nemo_style_rlhf.launch.bootstrap import setup
from nemo_style_rlhf.launch.program import ACTOR_PYTHON, Program
from nemo_style_rlhf.launch.supervisor import Supervisor
from nemo_style_rlhf.models.loading import load_causal_lm
from nemo_style_rlhf.models.policy import PolicyModel
from nemo_style_rlhf.ppo.sampler_check import Probe
from nemo_style_rlhf.schema.common import EngineConfig, ModelConfig, OptimizerConfig, RunConfig
from nemo_style_rlhf.schema.generation import GenerationConfig, SamplingOverrides
from nemo_style_rlhf.wire.connection import LeaseLost, ServerUnreachable
from nemo_style_rlhf.wire.messages import Code, ProtocolError
from nemo_style_rlhf.wire.secret import own_token_made
from nemo_style_rlhf.wire.unix_backend import THREADS
from tests.support.models import save_policy
from tests.support.processes import held_to

LONGEST = 40
LEASE = "trainer-1"


class Trainer:
    """A policy that DeepSpeed trains, and its published weights."""

    def __init__(self, path: Path, folder: Path) -> None:
        device = setup(RunConfig(output_dir="unused", device="cpu"))
        init_distributed(device)
        policy = PolicyModel(load_causal_lm(ModelConfig(path=str(path), dtype="float32")), temperature=1.0)
        self.engine = Engine(policy, EngineConfig(optim=OptimizerConfig(lr=0.02)), device=device)
        self.engine.eval()
        self.store = WeightStore(folder)
        self.version = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.engine.hf_weights()}

    def step(self) -> OwnWeights:
        """Other weights than before, ready to be published or loaded."""
        torch.manual_seed(self.version)
        for parameter in self.engine.module.parameters():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        self.version += 1
        return self.update()

    def update(self) -> OwnWeights:
        probe = Probe([Prompt(0, [3, 4, 5, 6], "")], 64, max_length=LONGEST, max_gap=1e-3).target(self.engine)
        return OwnWeights(self.version, self.engine.hf_weights(), probe)


def requests_of(count: int, step: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(step)
    requests = []
    for index in range(count):
        length = int(torch.randint(2, 28, (), generator=generator))
        prompt = tuple(torch.randint(1, 60, (length,), generator=generator).tolist())
        own = SamplingOverrides(temperature=0.7, stop_token_ids=(9,)) if index % 5 == 0 else SamplingOverrides()
        sample = SampleId(step, index // 2, index % 2)
        requests.append(GenerationRequest(sample, prompt, sample_seed(7, sample), 12, own))
    return requests


def same_bits(one: list[Completion], other: list[Completion]) -> bool:
    def plain(completion: Completion) -> tuple[object, ...]:
        return (completion.request, completion.token_ids.tolist(), completion.logprobs.tolist(), completion.finish_reason,
                completion.weights_version)  # fmt: skip

    return [plain(each) for each in one] == [plain(each) for each in other]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def trainer(policy, tmp_path_factory) -> Iterator[Trainer]:
    trainer = Trainer(policy, tmp_path_factory.mktemp("store") / "weights")
    yield trainer
    trainer.store.close()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory) -> Iterator[Supervisor]:
    with Supervisor(tmp_path_factory.mktemp("engines")) as launcher:
        yield launcher


def start(launcher: Supervisor, folder: Path, policies: dict[str, Path], *more: str) -> list[EngineClient]:
    """Engines by name, each of its own policy, that start at the same time; their ready files are in ``folder``."""
    for name, policy in policies.items():
        ready = folder / f"{name}.json"
        settings = [
            f"model.path={policy}", "model.dtype=float32", "run.device=cpu", "generation.kv_cache_gib=0.1",
            f"sequences.max_length={LONGEST}", "server.port=0", f"server.ready_file={ready}", *more,
        ]  # fmt: skip
        launcher.start(Program(name, [str(ACTOR_PYTHON), "servers/serve_engine.py", *settings], ready_file=ready))
    return [client_of(launcher, name) for name in policies]


def client_of(launcher: Supervisor, name: str) -> EngineClient:
    where = launcher[name].ready()
    return EngineClient(where["host"], where["port"], token=own_token_made(), retries=2, timeout_s=60)


@pytest.fixture(scope="module")
def engines(launcher, policy, tmp_path_factory) -> Iterator[list[EngineClient]]:
    clients = start(launcher, tmp_path_factory.mktemp("ready"), {"engine-0": policy, "engine-1": policy})
    yield clients
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def in_process(trainer, policy) -> VLLMGenerator:
    return VLLMGenerator(
        str(policy), GenerationConfig(kv_cache_gib=0.1), dtype="float32", seed=1234, max_model_len=LONGEST, eos_token_ids=[0],
        weight_shapes=trainer.shapes,
    )  # fmt: skip


def test_an_engine_listens_on_its_port_alone(launcher, engines):
    for name in ("engine-0", "engine-1"):
        where = launcher[name].ready()
        process = psutil.Process(where["pid"])
        tree = [process, *process.children(recursive=True)]
        listening = [each for one in tree for each in one.net_connections() if each.status == "LISTEN"]
        assert [each.laddr.port for each in listening] == [where["port"]]


def test_engines_sample_the_bits_of_a_generator_in_the_trainers_process(trainer, engines, in_process):
    for engine in engines:
        engine.acquire(LEASE, trainer.shapes)
    for _ in range(2):
        weights = trainer.store.publish(trainer.step())
        assert in_process.load(trainer.update()) < 1e-3
        for engine in engines:
            gap, loses_bits = engine.load(LEASE, weights)
            assert gap < 1e-3 and not loses_bits
            assert engine.status().version == trainer.version
        requests = requests_of(60, trainer.version)
        stream = in_process.stream(trainer.version)
        stream.submit(requests)
        samples = {completion.request.sample: completion for completion in stream.completed()}
        wanted = [samples[request.sample] for request in requests]
        assert len({tuple(each.token_ids.tolist()) for each in wanted}) > 50
        groups = [requests[start : start + 7] for start in range(0, 60, 7)]
        with ThreadPoolExecutor(len(groups)) as pool:
            calls = [
                pool.submit(engines[number % 2].generate, group, lease=LEASE, version=trainer.version)
                for number, group in enumerate(groups)
            ]
        assert same_bits([each for call in calls for each in call.result()], wanted)
        assert same_bits(engines[1].generate(groups[0], lease=LEASE, version=trainer.version), wanted[:7])


def test_sleep_leaves_nothing_that_the_next_weights_do_not_bring(trainer, engines, in_process):
    """As level 2 of vLLM's sleep on a GPU: weights and cache read as zeros afterwards, and their pages are the system's."""

    def of_worker(read: Callable[[list[torch.Tensor], list[torch.Tensor]], object]) -> object:
        def ask(worker) -> object:
            return read(list(worker.model_runner.get_model().parameters()), worker.model_runner.kv_caches)

        return in_process._llm.collective_rpc(ask)[0]

    in_process.load(trainer.step())
    engines[0].acquire(LEASE, trainer.shapes)
    requests = requests_of(20, 1)
    stream = in_process.stream(trainer.version)
    stream.submit(requests)
    with pytest.raises(TransferError, match="requests are running: the generator cannot sleep"):
        in_process.sleep()
    samples = {completion.request.sample: completion for completion in stream.completed()}
    wanted = [samples[request.sample] for request in requests]
    cache = of_worker(lambda _, caches: sum(each.fill_(1).nbytes for each in caches))
    held = held_bytes()
    in_process.sleep()
    assert held - held_bytes() > 0.9 * cache > 9e7
    assert of_worker(lambda _, caches: all(not each[1:-1].any() for each in caches))
    assert (
        of_worker(lambda weights, _: max(int((each == 0).sum()) for each in weights)) >= 1024
    )  # a page of the largest
    with pytest.raises(TransferError, match="the generator sleeps"):
        in_process.stream(trainer.version)
    stored = trainer.store.publish(trainer.update())
    for _ in range(2):  # as after a validation: the same weights again
        in_process.sleep()
        assert in_process.load(stored) < 1e-3
        engines[0].load(LEASE, stored)
        assert engines[0].sleep(LEASE) > 0
        with pytest.raises(ProtocolError, match="the engine holds none"):
            engines[0].generate(requests, lease=LEASE, version=trainer.version)
        engines[0].load(LEASE, stored)
        stream = in_process.stream(trainer.version)
        stream.submit(requests)
        samples = {completion.request.sample: completion for completion in stream.completed()}
        assert same_bits([samples[request.sample] for request in requests], wanted)
        assert same_bits(engines[0].generate(requests, lease=LEASE, version=trainer.version), wanted)


def test_an_engine_refuses_what_is_not_for_it(trainer, engines):
    engine, requests = engines[0], requests_of(4, 99)
    engine.acquire(LEASE, trainer.shapes)
    engine.load(LEASE, trainer.store.publish(trainer.step()))
    with pytest.raises(ProtocolError, match=f"version 77 is wanted, the engine holds {trainer.version}"):
        engine.generate(requests, lease=LEASE, version=77)
    with pytest.raises(LeaseLost, match="another trainer has acquired the engine"):
        engine.generate(requests, lease="an older trainer", version=trainer.version)
    long = [GenerationRequest(SampleId(0, 0, 0), (3,) * 39, 1, 12)]
    with pytest.raises(ProtocolError, match="may reach 51 tokens, this engine takes at most 40"):
        engine.generate(long, lease=LEASE, version=trainer.version)
    engine.acquire("trainer-2", trainer.shapes)
    with pytest.raises(ProtocolError, match="the engine holds none"):  # its weights were another trainer's
        engine.generate(requests, lease="trainer-2", version=trainer.version)


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ((3, 64, 5), {}, "token id 64 is not in the model's vocabulary of 64"),
        ((3,), {"top_p": 1.5}, "request 1: top_p=1.5 is not possible"),
        ((3,), {"temperature": 3.0}, "the generator refuses a request: temperature must be"),
        ((3,), {"stop": ("w5",)}, "the generator refuses a request: stop strings need a tokenizer"),
    ],
    ids=["token", "top_p", "temperature", "stop"],
)
def test_a_request_that_cannot_be_sampled_is_refused_and_the_engine_goes_on(trainer, engines, prompt, sampling, reason):
    """It is the second of three: the first, which was queued already, is dropped."""
    engine, requests = engines[0], requests_of(3, 98)
    engine.acquire(LEASE, trainer.shapes)
    engine.load(LEASE, trainer.store.publish(trainer.step()))
    wanted = engine.generate(requests, lease=LEASE, version=trainer.version)
    impossible = GenerationRequest(SampleId(0, 1, 0), prompt, 1, 12, SamplingOverrides(**sampling))
    with pytest.raises(ProtocolError, match=reason) as refused:
        engine.generate([requests[0], impossible, requests[1]], lease=LEASE, version=trainer.version)
    assert refused.value.code is Code.INVALID
    assert engine.status().running == 0
    assert same_bits(engine.generate(requests, lease=LEASE, version=trainer.version), wanted)
    engine.load(LEASE, trainer.store.publish(trainer.step()))


def test_a_killed_engine_is_noticed_and_another_returns_the_same_samples(trainer, launcher, engines, in_process):
    """SIGKILL in the middle of a call. The engine that is started again returns the same samples, too."""
    weights = trainer.store.publish(trainer.step())
    for engine in engines:
        engine.acquire(LEASE, trainer.shapes)
        engine.load(LEASE, weights)
    in_process.load(trainer.update())
    requests = [
        GenerationRequest(SampleId(5, number, 0), (3 + number % 50, 4), sample_seed(7, SampleId(5, number, 0)), 36)
        for number in range(500)
    ]
    stream = in_process.stream(trainer.version)
    stream.submit(requests)
    samples = {completion.request.sample: completion for completion in stream.completed()}
    wanted = [samples[request.sample] for request in requests]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engines[0].generate, requests, lease=LEASE, version=trainer.version)
        deadline = time.monotonic() + 30
        while engines[0].status().running == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engines[0].status().running > 0 and not call.done()
        os.kill(launcher["engine-0"].ready()["pid"], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(ServerUnreachable):
            call.result(timeout=30)
        assert time.monotonic() - killed < 30
    assert launcher["engine-0"].wait(10) == -signal.SIGKILL
    assert same_bits(engines[1].generate(requests, lease=LEASE, version=trainer.version), wanted)
    launcher.restart("engine-0")
    engines[0].close()
    engines[0] = client_of(launcher, "engine-0")
    engines[0].acquire(LEASE, trainer.shapes)
    engines[0].load(LEASE, weights)
    assert same_bits(engines[0].generate(requests, lease=LEASE, version=trainer.version), wanted)


def test_a_slow_engine_is_waited_for_and_says_how_it_stands(trainer, launcher, engines, in_process):
    """With 5 % of the time, and as many calls as it may have, each of which takes longer than its client waits for others."""
    weights = trainer.store.publish(trainer.step())
    in_process.load(trainer.update())
    where, most_s = launcher["engine-0"].ready(), 1.0
    engine = EngineClient(where["host"], where["port"], token=own_token_made(), retries=0, timeout_s=most_s)
    engines[0].acquire(LEASE, trainer.shapes)
    engines[0].load(LEASE, weights)
    engine.acquire(LEASE, trainer.shapes)
    requests = [
        GenerationRequest(SampleId(6, number, 0), (3 + number % 50, 4), sample_seed(7, SampleId(6, number, 0)), 36)
        for number in range(THREADS)
    ]
    stream = in_process.stream(trainer.version)
    stream.submit(requests)
    samples = {completion.request.sample: completion for completion in stream.completed()}
    steps = [engine.status().steps]
    with held_to(0.05, where["pid"]), ThreadPoolExecutor(THREADS) as pool:
        began = time.monotonic()
        calls = [pool.submit(engine.generate, [each], lease=LEASE, version=trainer.version) for each in requests]
        while not all(call.done() for call in calls):
            steps.append(engine.status(retry=False).steps)
            time.sleep(0.2)
        answers = [each for call in calls for each in call.result()]
        assert time.monotonic() - began > 2 * most_s
    assert same_bits(answers, [samples[request.sample] for request in requests])
    assert steps[0] < steps[len(steps) // 2] < steps[-1]
    engine.close()


@pytest.mark.more
def test_an_engine_of_two_devices_samples_the_same_after_it_was_killed(trainer, launcher, policy, tmp_path):
    """Nothing is left of the one that was killed: neither its workers nor segments of memory."""
    before = set(os.listdir("/dev/shm"))
    weights, requests = trainer.store.publish(trainer.step()), requests_of(40, 96)
    samples = []
    (engine,) = start(launcher, tmp_path, {"wide": policy}, "generation.tensor_parallel_size=2", "run.num_threads=1")
    for end in (signal.SIGKILL, signal.SIGTERM):
        engine.acquire(LEASE, trainer.shapes)
        engine.load(LEASE, weights)
        samples.append(engine.generate(requests, lease=LEASE, version=trainer.version))
        workers = psutil.Process(launcher["wide"].ready()["pid"]).children(recursive=True)
        assert len(workers) >= 3  # and the front door
        os.kill(launcher["wide"].ready()["pid"], end)
        assert launcher["wide"].wait(30) == (-end if end == signal.SIGKILL else 0)
        assert not psutil.wait_procs(workers, 20)[1]
        left = set(os.listdir("/dev/shm")) - before
        assert not [name for name in left if "cpushm" in name or name.startswith("nsr-bucket")]
        engine.close()
        if end == signal.SIGKILL:
            launcher.restart("wide")
            engine = client_of(launcher, "wide")
    assert same_bits(*samples)
    assert len({tuple(each.token_ids.tolist()) for each in samples[0]}) > 30


def drop_a_tensor(folder: Path, older: Path) -> None:
    path = folder / "part_00000.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def take_the_file_of_the_version_before(folder: Path, older: Path) -> None:
    shutil.copyfile(older / "part_00000.safetensors", folder / "part_00000.safetensors")


def flip_a_bit(folder: Path, older: Path) -> None:
    path = folder / "part_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[Callable[[Path, Path], None], str]] = [
    (drop_a_tensor, "is incomplete or damaged"),
    (take_the_file_of_the_version_before, "a tensor is stale or damaged"),
    (flip_a_bit, "a tensor is stale or damaged"),
    (flip_a_bit, "a tensor is stale or damaged"),
]


@pytest.mark.more
def test_engines_refuse_damaged_weights_and_end(trainer, launcher, engines, in_process, policy, tmp_path, monkeypatch):
    """An engine that did not get its weights whole must not sample any more: it says why and ends with 1. Started again, it
    loads the whole version, and samples as ever. Two damages at a time, one in a folder, one in what is sent; then engines of
    other models."""
    older = trainer.store.publish(trainer.step())
    whole = trainer.store.publish(trainer.step())
    in_process.load(trainer.update())
    requests = requests_of(8, 97)
    stream = in_process.stream(trainer.version)
    stream.submit(requests)
    samples = {completion.request.sample: completion for completion in stream.completed()}
    wanted = [samples[request.sample] for request in requests]

    def refused(engine: EngineClient, weights: PublishedWeights, reason: str) -> None:
        with pytest.raises(ServerUnreachable, match=reason):
            engine.load(LEASE, weights)
        engine.close()

    for first in range(0, len(DAMAGES), 2):
        for number, (damage, reason) in enumerate(DAMAGES[first : first + 2]):
            engine = engines[number]
            engine.acquire(LEASE, trainer.shapes)
            engine.load(LEASE, older)
            damaged = tmp_path / f"{damage.__name__}_{number}"
            shutil.copytree(whole.folder, damaged)
            damage(damaged, older.folder)
            monkeypatch.chdir(tmp_path)
            seen = damaged if number == 0 else Path(damaged.name)  # which is no folder where the engine runs
            refused(engine, PublishedWeights.open(seen), reason)
        for number in range(2):
            assert launcher[f"engine-{number}"].wait(15) == 1
            launcher.restart(f"engine-{number}")
        for number in range(2):
            engines[number] = client_of(launcher, f"engine-{number}")
            engines[number].acquire(LEASE, trainer.shapes)
            engines[number].load(LEASE, whole)
            assert same_bits(engines[number].generate(requests, lease=LEASE, version=trainer.version), wanted)
    wider = save_policy(tmp_path / "wider", hidden_size=128)
    deep = save_policy(tmp_path / "deep", num_hidden_layers=3)
    others = start(launcher, tmp_path, {"engine-wider": wider, "engine-deeper": deep})
    for other in others:
        other.acquire(LEASE, trainer.shapes)
    refused(others[0], whole, "failed and the server ends")
    refused(others[1], whole, "it does not hold the trainer's weights")
    for name in ("engine-wider", "engine-deeper"):
        assert launcher[name].wait(15) == 1
