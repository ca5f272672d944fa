"""Calls to an engine never wait for an answer that cannot come, whatever its generator does."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_style_rlhf.engines import groups, messages
from nemo_style_rlhf.engines import service as engine_service
from nemo_style_rlhf.engines.groups import Groups
from nemo_style_rlhf.engines.service import EngineService
from nemo_style_rlhf.generation.in_process import Finished, InProcessGenerator
from nemo_style_rlhf.generation.interface import GenerationRequest, ProbeTarget, SampleId
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.generation.weight_store import PublishedWeights, WeightStore
from nemo_style_rlhf.wire.messages import REQUEST, RESPONSE, Array, Code, ProtocolError, bytes_tensor, json_tensor

GROUP = "group-0123456789abcdef"
WEIGHTS = {"weight": torch.zeros(2)}
FORBIDDEN, BREAKING, ENDLESS = 50, 51, 52
"""Tokens at which this generator refuses a request, fails, or never ends."""


class Counting(InProcessGenerator):
    """Continues a prompt with its last token plus one. The last request ends first."""

    def __init__(self) -> None:
        super().__init__({})
        self.slept, self.woken = 0, list[str]()
        self.queued: dict[str, GenerationRequest] = {}

    def _add(self, name: str, request: GenerationRequest) -> None:
        if FORBIDDEN in request.prompt:
            raise ValueError("not this token")
        self.queued[name] = request

    def _step(self) -> list[Finished]:
        if any(BREAKING in request.prompt for request in self.queued.values()):
            raise IndexError("out of range")
        ended = {name: request for name, request in self.queued.items() if ENDLESS not in request.prompt}
        for name in ended:
            del self.queued[name]
        return [
            Finished(name, torch.tensor([each.prompt[-1] + 1]), torch.zeros(1), "stop")
            for name, each in reversed(ended.items())
        ]

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self.queued[name]

    def _replace_weights(self, buckets: Iterator[list[tuple[str, Tensor]]]) -> None:
        for _ in buckets:
            pass

    def _sleep(self) -> None:
        self.slept += 1

    def _wake_weights(self) -> None:
        self.woken.append("weights")

    def _wake_cache(self) -> None:
        self.woken.append("cache")

    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.zeros(len(sequence) - 1) for sequence in sequences]


class Engine:
    """A service with its thread."""

    published: PublishedWeights
    """The weights that it holds."""

    def __init__(self, folder: Path) -> None:
        self.generator = Counting()
        self.service = EngineService(
            self.generator, boot_id="boot", max_sequence_length=20, vocabulary=60, max_request_bytes=4096, folder=folder
        )
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.service.run, args=(self.end.is_set,))
        self.thread.start()

    def ask(self, endpoint: str, **content: object) -> dict[str, object]:
        outputs = self.service.handle(endpoint, {REQUEST.name: json_tensor(content)})
        answer: dict[str, object] = json.loads(outputs[RESPONSE.name][0])
        return answer

    def load(self, folder: Path, *, lease: str = "trainer", digest: str | None = None) -> dict[str, object]:
        return self.ask("engine_load", lease=lease, folder=str(folder), digest=digest or self.published.digest)

    def send(self, file: str, content: bytes, *, lease: str = "trainer", offset: int = 0) -> None:
        request = json_tensor({"lease": lease, "file": file, "offset": offset})
        self.service.handle("engine_send", {"content": np.array([content], dtype=object), REQUEST.name: request})

    def generate(self, *prompts: tuple[int, ...], lease: str = "trainer", version: int = 1) -> list[list[int]]:
        requests = [GenerationRequest(SampleId(0, 0, 0), prompt, 1, 4) for prompt in prompts]
        inputs: dict[str, Array] = messages.generate_inputs(requests, lease=lease, version=version)
        outputs = self.service.handle("engine_generate", inputs)
        return [each.token_ids.tolist() for each in messages.parse_completions(requests, outputs, version)]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine of the lease ``trainer`` that holds version 1."""
    monkeypatch.setattr(engine_service, "IDLE_S", 0.01)  # after which it sees that it has to end
    engine = Engine(tmp_path)
    probe = ProbeTarget(((1, 2),), (torch.zeros(1),), 1e-3)
    store = WeightStore(tmp_path / "weights")
    engine.ask("engine_acquire", lease="trainer", shapes={"weight": [2]})
    engine.published = store.publish(OwnWeights(1, iter(WEIGHTS.items()), probe))
    assert engine.load(engine.published.folder) == {"gap": 0.0, "loses_bits": ""}
    yield engine
    engine.end.set()
    engine.thread.join(10)
    assert not engine.thread.is_alive()


def test_samples_come_in_the_order_of_the_requests(engine: Engine) -> None:
    assert engine.generate((1,), (2, 9), (3,)) == [[2], [10], [4]]


@pytest.mark.parametrize(
    "prompts", [[(1,), (FORBIDDEN,), (2,)], [(60,)], [(1,) * 17]], ids=["generator", "id", "length"]
)
def test_a_request_that_is_refused_leaves_nothing_behind(engine: Engine, prompts: list[tuple[int, ...]]) -> None:
    with pytest.raises(ProtocolError) as refused:
        engine.generate(*prompts)
    assert refused.value.code is Code.INVALID
    assert not engine.generator.queued and engine.ask("engine_status")["running"] == 0
    assert engine.generate((1,)) == [[2]] and not engine.service.failed.is_set()


@pytest.mark.parametrize(
    "shape", ["[Infinity]", "[NaN]", "[1.5]", '"12"', '["1"]', "[-1]", "[true]", "{}", "null", "7"]
)
def test_shapes_that_are_none_are_refused_and_take_no_lease(engine: Engine, shape: str) -> None:
    content = bytes_tensor(b'{"lease": "another", "shapes": {"weight": %s}}' % shape.encode())
    with pytest.raises(
        ProtocolError, match=r"request\.shapes is .*, expected a list of sizes for each tensor"
    ) as refused:
        engine.service.handle("engine_acquire", {REQUEST.name: content})
    assert refused.value.code is Code.INVALID
    assert engine.generate((1,)) == [[2]]


def test_the_sentence_about_another_version_is_short(engine: Engine) -> None:
    with pytest.raises(ProtocolError, match="the engine holds 1") as refused:
        engine.generate((1,), version=10**4000)
    assert refused.value.code is Code.WRONG_STEP and len(str(refused.value)) < 100


def test_a_generator_that_fails_answers_every_call_and_ends_the_engine(engine: Engine) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(engine.generate, (ENDLESS,))
        while engine.ask("engine_status")["running"] == 0:
            pass
        broken = pool.submit(engine.generate, (BREAKING,))
        for call in (waiting, broken):
            with pytest.raises(ProtocolError, match="the generator failed and the engine ends") as failed:
                call.result(10)
            assert failed.value.code is Code.INTERNAL
    engine.thread.join(10)
    assert engine.service.failed.is_set() and not engine.thread.is_alive()
    with pytest.raises(ProtocolError, match="the engine is stopping"):  # not even a late call waits forever
        engine.generate((1,))


def test_an_engine_that_ends_answers_calls_under_way(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, (ENDLESS,))
        while engine.ask("engine_status")["running"] == 0:
            pass
        engine.end.set()
        with pytest.raises(ProtocolError, match="the engine is stopping") as stopped:
            call.result(10)
    assert stopped.value.code is Code.STOPPING and not engine.generator.queued


def test_another_trainer_drops_the_requests_and_the_weights_of_the_one_before(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, (ENDLESS,))
        while engine.ask("engine_status")["running"] == 0:
            pass
        engine.ask("engine_acquire", lease="another", shapes={"weight": [2]})
        with pytest.raises(ProtocolError) as lost:
            call.result(10)
    assert lost.value.code is Code.LEASE_LOST and not engine.generator.queued
    for lease, code in (("trainer", Code.LEASE_LOST), ("another", Code.WRONG_STEP)):
        with pytest.raises(ProtocolError) as refused:
            engine.generate((1,), lease=lease)
        assert refused.value.code is code


def test_an_engine_that_sleeps_answers_nothing_until_it_is_sent_weights(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, (ENDLESS,))
        while engine.ask("engine_status")["running"] == 0:
            pass
        with pytest.raises(ProtocolError, match="1 requests are running") as refused:
            engine.ask("engine_sleep", lease="trainer")
        assert refused.value.code is Code.CONFLICT
        engine.ask("engine_acquire", lease="another", shapes={"weight": [2]})
        with pytest.raises(ProtocolError, match="another trainer has acquired the engine"):
            call.result(10)
    with pytest.raises(ProtocolError, match="another trainer has acquired the engine"):
        engine.ask("engine_sleep", lease="trainer")
    engine.load(engine.published.folder, lease="another")
    for _ in range(2):
        assert engine.ask("engine_sleep", lease="another")["held_bytes"] > 0  # type: ignore[operator]
        assert engine.generator.slept == 1 and engine.ask("engine_status")["version"] is None
        with pytest.raises(ProtocolError, match="version 1 is wanted, the engine holds none") as refused:
            engine.generate((1,), lease="another")
        assert refused.value.code is Code.WRONG_STEP
    engine.load(engine.published.folder, lease="another")
    assert engine.generate((1,), lease="another") == [[2]]
    assert engine.generator.woken == ["weights", "cache"]


def test_no_weights_are_loaded_while_requests_run(engine: Engine, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, (ENDLESS,))
        while engine.ask("engine_status")["running"] == 0:
            pass
        assert engine.load(engine.published.folder)["gap"] == 0.0  # the weights that it holds
        with pytest.raises(ProtocolError, match="1 requests are running") as refused:
            engine.load(engine.published.folder, digest="another")
        assert refused.value.code is Code.CONFLICT and not engine.service.failed.is_set()
        engine.end.set()
        with pytest.raises(ProtocolError):
            call.result(10)


def test_damaged_weights_end_the_engine(engine: Engine, tmp_path: Path) -> None:
    (engine.published.folder / "part_00000.safetensors").write_bytes(b"")
    engine.ask("engine_acquire", lease="another", shapes={"weight": [2]})
    with pytest.raises(ProtocolError, match="incomplete or damaged") as refused:
        engine.load(engine.published.folder, lease="another")
    assert refused.value.code is Code.INTERNAL
    engine.thread.join(10)
    assert engine.service.failed.is_set() and not engine.thread.is_alive()
    with pytest.raises(ProtocolError, match="the engine is stopping"):  # not even a late call waits forever
        engine.generate((1,))


@pytest.mark.parametrize("there", [False, True])
def test_weights_that_are_not_there_are_asked_for_and_cost_nothing(engine: Engine, there: bool) -> None:
    folder = engine.published.folder if there else Path("/nowhere")
    with pytest.raises(ProtocolError, match="they must be sent") as refused:
        engine.load(folder, digest="another")
    assert refused.value.code is Code.NOT_FOUND
    assert engine.generate((1,)) == [[2]]


def test_weights_are_sent_in_pieces_of_any_size_and_pieces_may_come_again(engine: Engine) -> None:
    engine.ask("engine_acquire", lease="another", shapes={"weight": [2]})
    for path in engine.published.files:
        content = path.read_bytes()
        for start in range(0, len(content), 7):
            engine.send(path.name, content[start : start + 7], lease="another", offset=start)
            engine.send(path.name, content[start : start + 7], lease="another", offset=start)
    assert engine.load(Path("/nowhere"), lease="another") == {"gap": 0.0, "loses_bits": ""}
    assert engine.generate((1,), lease="another") == [[2]]
    assert engine.load(Path("/nowhere"), lease="another") == {
        "gap": 0.0,
        "loses_bits": "",
    }  # asked again: the answer was lost
    engine.ask("engine_acquire", lease="a third", shapes={"weight": [2]})
    with pytest.raises(ProtocolError, match="they must be sent"):  # they were kept in memory no longer than needed
        engine.load(Path("/nowhere"), lease="a third")


def test_another_version_than_the_one_that_was_sent_is_not_loaded(engine: Engine) -> None:
    for path in engine.published.files:
        engine.send(path.name, path.read_bytes())
    with pytest.raises(ProtocolError, match="were sent, another are to be loaded"):
        engine.load(Path("/nowhere"), digest="another")


def test_a_version_that_was_sent_in_part_ends_the_engine(engine: Engine) -> None:
    engine.ask("engine_acquire", lease="another", shapes={"weight": [2]})
    engine.send("manifest.json", (engine.published.folder / "manifest.json").read_bytes(), lease="another")
    with pytest.raises(ProtocolError, match=r"incomplete or damaged: 'part_00000.safetensors'"):
        engine.load(Path("/nowhere"), lease="another")
    engine.thread.join(10)
    assert engine.service.failed.is_set()


def receive(engine: Engine, **changes: object) -> None:
    files = [[path.name, path.stat().st_size] for path in engine.published.files]
    content = {"lease": "trainer", "group": GROUP, "rank": 1, "size": 2, "backend": "gloo", "files": files}
    engine.ask("engine_receive", **content | changes)


def test_weights_are_received_in_a_group_which_goes_on(engine: Engine, tmp_path: Path) -> None:
    groups = Groups(tmp_path)
    for lease in ("trainer", "another", "a third"):
        engine.ask("engine_acquire", lease=lease, shapes={"weight": [2]})
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(receive, engine, lease=lease)
            group = groups.meet(GROUP, 0, 2, "gloo")
            for path in engine.published.files:
                group.send(path)
            call.result(10)
        assert engine.load(Path("/nowhere"), lease=lease) == {"gap": 0.0, "loses_bits": ""}


def test_a_group_that_does_not_meet_costs_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "TIMEOUT", timedelta(seconds=1))
    with pytest.raises(ProtocolError, match="the group of trainer and engines broke") as refused:
        receive(engine)
    assert refused.value.code is Code.CONFLICT
    assert engine.generate((1,)) == [[2]]
    engine.ask("engine_acquire", lease="another", shapes={"weight": [2]})
    assert engine.load(engine.published.folder, lease="another") == {"gap": 0.0, "loses_bits": ""}


@pytest.mark.parametrize(
    "change",
    [
        {"lease": "nobody"}, {"group": "../group-0123456789abcdef"}, {"group": ""}, {"backend": "mpi"}, {"rank": 0}, {"rank": 2},
        {"size": 10**9}, {"files": [["a", 2**40]]}, {"files": [["a", -1]]}, {"files": [["a"]]}, {"files": ["a"]},
        {"files": [[1, 1]]},
    ],
)  # fmt: skip
def test_a_group_that_cannot_be_is_refused_at_once(engine: Engine, change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError) as refused:
        receive(engine, **change)
    assert refused.value.code in (Code.INVALID, Code.LEASE_LOST)


def test_pieces_that_belong_to_no_weights_are_refused(engine: Engine) -> None:
    with pytest.raises(ProtocolError, match="another trainer"):
        engine.send("a", b"1", lease="nobody")
    for offset in (-1, 1, 2**70):
        with pytest.raises(ProtocolError, match=f"a has 0 bytes so far, offset {str(offset)[:20]} is not possible"):
            engine.send("a", b"1", offset=offset)
    large = bytes(2**24)
    for number in range(4):
        engine.send(f"part {number}", large)
    with pytest.raises(ProtocolError, match="weights of these shapes take at most 67109904 bytes") as refused:
        engine.send("part 4", large)
    assert refused.value.code is Code.INVALID
    engine.ask("engine_acquire", lease="another", shapes={"weight": [2]})
    for number in range(4):  # with a new lease there is room again
        engine.send(f"part {number}", large, lease="another")


@pytest.mark.parametrize("shapes", [{"weight": 2}, {"weight": ["x"]}, {"weight": [None]}])
def test_shapes_that_are_none_are_refused(engine: Engine, shapes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="a list of sizes for each tensor") as refused:
        engine.ask("engine_acquire", lease="another", shapes=shapes)
    assert refused.value.code is Code.INVALID
    assert engine.generate((1,)) == [[2]]


def test_a_call_that_takes_long_is_asked_for_again_and_computed_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time limit ends it, and a repeat, also one beside another, joins it."""
    monkeypatch.setattr(engine_service, "WAIT_S", 0.2)
    go_on, step = threading.Event(), engine.generator._step
    monkeypatch.setattr(engine.generator, "_step", lambda: step() if go_on.wait(0.01) else [])
    for _ in range(3):
        with pytest.raises(ProtocolError) as told:
            engine.generate((3, 4))
        assert told.value.code is Code.PENDING
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(engine.generate, (3, 4)) for _ in range(2)]
        assert engine.generator.running == 1
        go_on.set()
        assert [each.result(10) for each in both] == [[[5]], [[5]]]


def test_a_call_that_nobody_asks_for_any_more_is_dropped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_service, "WAIT_S", 0.1)
    monkeypatch.setattr(engine_service, "LEFT_S", 0.5)
    with pytest.raises(ProtocolError):
        engine.generate((3, ENDLESS))
    assert engine.generator.running == 1
    deadline = time.monotonic() + 10
    while engine.generator.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.generator.running == 0 and engine.generate((3, 4)) == [[5]]


def serve_until_told(ready: Any) -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    service = EngineService(Counting(), boot_id="b", max_sequence_length=40, vocabulary=64, max_request_bytes=2**20)
    ready.put(None)
    service.run(lambda: bool(told))


@pytest.mark.slow("starts a process")
def test_an_engine_that_stood_still_when_it_was_told_to_end_ends() -> None:
    """As one that is paused when its trainer dies."""
    context = get_context("spawn")
    ready = context.SimpleQueue()
    engine = context.Process(target=serve_until_told, args=(ready,))
    engine.start()
    ready.get()
    time.sleep(engine_service.IDLE_S / 2)  # it waits for a call
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        os.kill(engine.pid, number)
        time.sleep(3 * engine_service.IDLE_S if number is signal.SIGSTOP else 0.1)
    engine.join(10)
    engine.kill()
    assert engine.exitcode == 0
