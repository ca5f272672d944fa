"""The wire contract, the ledger of leases and steps, and the store of critics: no process, no network, no torch."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.critic_service import connection, protocol, validation
from nemo_style_rlhf.critic_service.connection import Connection
from nemo_style_rlhf.critic_service.kserve import decode_response, encode_request
from nemo_style_rlhf.critic_service.ledger import Ledger
from nemo_style_rlhf.critic_service.protocol import Code, Limits, ProtocolError
from nemo_style_rlhf.critic_service.secret import read_token
from nemo_style_rlhf.critic_service.store import CriticCheckpointStore
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig
from tests.unit.checkpoint.test_store import make_unreadable

LIMITS = Limits(vocab_size=10, max_length=8, max_request_bytes=4096)
PLAN = {"lease": "L", "step": 1, "part": 1, "parts": 1, "mini_batches": [[0, 1]], "digest": "d"}


def train_inputs(lease: str = "L", step: int = 1, part: int = 1, parts: int = 1, **changes: np.ndarray) -> dict:
    arrays = (
        np.array([1, 2, 3, 4, 5], np.int32),
        np.array([2, 3], np.int32),
        np.zeros(5, np.float32),
        np.zeros(5, np.float32),
        np.array([1, 0, 0, 1, 0], np.float32),
    )
    plan = protocol.part_plan(
        lease=lease, step=step, part=part, parts=[arrays] * parts, mini_batches=[[0, 1]], normalizers=[2]
    )
    tensors = (*arrays, protocol.json_tensor(plan))
    return {spec.name: tensor for spec, tensor in zip(protocol.TRAIN.inputs, tensors, strict=True)} | changes


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_ragged_is_undone_by_unragged(lengths: list[int]) -> None:
    sequences = [np.arange(length, dtype=np.int32) for length in lengths]
    flat = protocol.ragged(sequences)
    back = protocol.unragged(flat["tokens"], flat["sequence_lengths"])
    assert [sequence.tolist() for sequence in back] == [sequence.tolist() for sequence in sequences]


def test_a_train_part_is_read_whole() -> None:
    part = validation.read_train(train_inputs(), LIMITS)
    assert (part.lease, part.step, part.part, part.parts) == ("L", 1, 1, 1)
    assert part.plan is not None
    assert part.plan.mini_batches == [[0, 1]]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"tokens": np.array([1, 2, 3, 4, 10], np.int32)}, r"tokens\[4\] is 10, outside the vocabulary 0\.\.9"),
        ({"sequence_lengths": np.array([2, 2], np.int32)}, "sequence_lengths add up to 4 but tokens has 5"),
        ({"returns": np.zeros(4, np.float32)}, "returns has 4 entries but tokens has 5"),
        ({"old_values": np.array([0, 0, np.inf, 0, 0], np.float32)}, r"old_values\[2\] is NaN or infinite"),
        ({"mask": np.array([1, 1, 0, 1, 0], np.float32)}, "mask is 1 at the last token of sequence 0"),
        ({"mask": np.array([1, 0, 0, 2, 0], np.float32)}, r"mask\[3\] is neither 0 nor 1"),
        ({"plan": protocol.json_tensor({"lease": "L"})}, "plan.step is missing"),
        ({"plan": protocol.bytes_tensor(b'{"lease": NaN}')}, "plan contains NaN"),
        (
            {"plan": protocol.json_tensor({**PLAN, "normalizers": [10**400]})},
            "plan.normalizers is .*expected a list of numbers",
        ),
        ({"tokens": np.zeros(2000, np.int32)}, "expected at most 4096"),
    ],
)
def test_a_bad_part_is_refused_with_the_tensor_and_the_rule(changes: dict, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence) as refusal:
        validation.read_train(train_inputs(**changes), LIMITS)
    assert refusal.value.code is Code.INVALID


def test_a_request_may_be_as_long_as_the_limit_says() -> None:
    """JSON beside the tensors does not count: the client that splits a batch does not count it."""

    def ragged(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(sum(lengths), np.int32), np.array(lengths, np.int32)

    tokens, lengths = ragged([8] * 113 + [6])  # 4 bytes for each of 910 tokens and 114 lengths
    wanted = protocol.json_tensor({"want": "values"})
    inputs = {"tokens": tokens, "sequence_lengths": lengths, "request": wanted}
    assert len(validation.read_infer(inputs, LIMITS)[0].lengths) == 114
    tokens, lengths = ragged([8] * 30 + [4, 4])  # 16 bytes for each of 248 tokens, 4 for each of 32 lengths
    numbers = np.zeros(248, np.float32)
    part = train_inputs(tokens=tokens, sequence_lengths=lengths, returns=numbers, old_values=numbers, mask=numbers)
    assert validation.read_train(part, LIMITS).nbytes == LIMITS.max_request_bytes


def test_errors_survive_the_wire() -> None:
    for code in Code:
        parsed = ProtocolError.parse(str(ProtocolError(code, "a sentence")))
        assert (parsed.code, parsed.message) == (code, "a sentence")
    assert ProtocolError.parse("what Triton says").code is Code.INVALID


def test_the_digest_of_a_step_does_not_depend_on_its_parts() -> None:
    whole = tuple(train_inputs()[spec.name] for spec in protocol.TRAIN.inputs[:5])
    first = tuple(array[:size] for array, size in zip(whole, (2, 1, 2, 2, 2), strict=True))
    second = tuple(array[size:] for array, size in zip(whole, (2, 1, 2, 2, 2), strict=True))
    digest = protocol.train_digest([whole], [[0, 1]], [2])
    assert protocol.train_digest([first, second], [[0, 1]], [2]) == digest
    assert protocol.train_digest([second, first], [[0, 1]], [2]) != digest
    assert protocol.train_digest([whole], [[1, 0]], [2]) != digest


def test_kserve_bodies_round_trip() -> None:
    body, head_length = encode_request(protocol.TRAIN, train_inputs())
    head = json.loads(body[:head_length])
    assert [entry["name"] for entry in head["inputs"]] == [spec.name for spec in protocol.TRAIN.inputs]
    answer = json.dumps({"outputs": head["inputs"]}).encode()  # an echo has the same form
    outputs = decode_response(answer + body[head_length:], len(answer))
    for name, tensor in train_inputs().items():
        np.testing.assert_array_equal(outputs[name], tensor)


def test_the_ledger_counts_every_step_once() -> None:
    ledger = Ledger(max_staged_bytes=2**30)
    lease = ledger.acquire("run")
    one, two = (validation.read_train(train_inputs(lease, 1, part, 2), LIMITS) for part in (1, 2))
    assert ledger.stage(one) == ({"staged": 1, "parts": 2}, None)
    complete = ledger.stage(two)[1]
    assert complete is not None
    assert [part.part for part in complete] == [1, 2]
    ledger.applied([one, two], {"answer": 1})
    assert ledger.stage(two) == ({"answer": 1}, None)
    assert ledger.step == 1
    with pytest.raises(ProtocolError, match="train step 3 does not follow: the critic is at step 1"):
        ledger.stage(validation.read_train(train_inputs(lease, 3), LIMITS))


def test_the_ledger_takes_so_many_bytes_of_a_step() -> None:
    """A part here has 88: 5 tokens of 16 and 2 sequences of 4. One that is sent again counts once."""
    ledger = Ledger(max_staged_bytes=2 * 88)
    lease = ledger.acquire("run")
    parts = [validation.read_train(train_inputs(lease, 1, part, 3), LIMITS) for part in (1, 2, 3)]
    for part in (parts[0], parts[1], parts[1]):
        ledger.stage(part)
    with pytest.raises(
        ProtocolError, match=r"step 1 comes to 264 bytes .* critic.max_staged_bytes is 176: "
    ) as refusal:
        ledger.stage(parts[2])
    assert refusal.value.code is Code.INVALID
    ledger.drop()
    assert ledger.stage(parts[2]) == ({"staged": 1, "parts": 3}, None)


def test_a_lease_is_for_the_checkpoints_of_its_run() -> None:
    ledger = Ledger(max_staged_bytes=2**30)
    lease = ledger.acquire("mine")
    ledger.check_run(lease, "mine-step_000001")
    with pytest.raises(ProtocolError, match=r"^\[conflict\] checkpoint theirs-step_000001 is of the run theirs"):
        ledger.check_run(lease, "theirs-step_000001")
    with pytest.raises(ProtocolError, match=r"^\[lease_lost\]"):
        ledger.check_run("another", "mine-step_000001")


def test_an_answer_of_a_lost_lease_is_nobodys() -> None:
    """The step ran while the lease was lost: it counts, but the new holder does not get the old one's answer."""
    ledger = Ledger(max_staged_bytes=2**30)
    old = ledger.acquire("old")
    part = validation.read_train(train_inputs(old), LIMITS)
    ledger.stage(part)
    new = ledger.acquire("new")
    ledger.applied([part], {"answer": 1})
    with pytest.raises(ProtocolError, match="does not follow: the critic is at step 1"):
        ledger.stage(validation.read_train(train_inputs(new), LIMITS))
    with pytest.raises(ProtocolError, match="run 'new' holds it now"):
        ledger.check(old)


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    store = CriticCheckpointStore(tmp_path)
    store.save("run-step_000001", 3, lambda directory: (directory / "weights").write_text("old"))
    (tmp_path / "checkpoints/run-step_000001/critic").rename(tmp_path / "checkpoints/run-step_000001/critic.old")
    (tmp_path / "checkpoints/run-step_000001/critic.tmp").mkdir()
    directory, record = CriticCheckpointStore(tmp_path).verified("run-step_000001", None)
    assert record.critic_step == 3
    assert (directory / "weights").read_text() == "old"
    assert not (tmp_path / "checkpoints/run-step_000001/critic.tmp").exists()


def test_a_checkpoint_of_another_dtype_is_not_restored_whatever_its_ranks(tmp_path: Path) -> None:
    store = CriticCheckpointStore(tmp_path, {"model.dtype": "float32"})
    store.save("run-step_000001", 3, lambda directory: (directory / "weights").write_text("w"))
    with pytest.raises(ProtocolError, match=r"a critic with model\.dtype float32, this one has bfloat16"):
        CriticCheckpointStore(tmp_path, {"model.dtype": "bfloat16"}).verified("run-step_000001", None)
    record = tmp_path / "checkpoints/run-step_000001/critic/critic.json"
    content = json.loads(record.read_text())
    content.pop("critic")
    for earlier in ({}, {"shape": {"ranks": 2}}, {"shape": {"model.dtype": "float32"}}):
        record.write_text(json.dumps({**content, **earlier}))
        assert store.verified("run-step_000001", None)[1].critic_step == 3
    with pytest.raises(ProtocolError, match=r"a critic with model\.dtype float32, this one has bfloat16"):
        CriticCheckpointStore(tmp_path, {"model.dtype": "bfloat16"}).verified("run-step_000001", None)


def test_after_a_fallback_both_sides_keep_the_same_checkpoints(tmp_path: Path) -> None:
    """Those that the run has gone back behind are the first to go, not the last good ones before them."""
    critics, actors = CriticCheckpointStore(tmp_path / "server"), CheckpointStore(tmp_path / "actor", keep_last=3)

    def commit(step: int) -> None:
        critics.save(checkpoint_id("run", step), step, lambda directory: None)
        actors.begin(step)
        actors.commit(step, "run", critic={}, state={}, versions={})
        critics.commit(checkpoint_id("run", step), keep=3)
        actors.prune(step)

    for step in (10, 20, 30):
        commit(step)
    critics.commit(checkpoint_id("run", 20), keep=None)  # as a restore does, here because 30 is damaged
    actors.resume_from(20)
    commit(25)
    assert critics.committed == [checkpoint_id("run", step) for step in (10, 20, 25)]
    for step in (28, 35):
        commit(step)
    assert critics.committed == [checkpoint_id("run", step) for step in actors.committed_steps()]


def test_where_the_new_folder_cannot_take_its_place_the_old_one_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CriticCheckpointStore(tmp_path)
    store.save("run-step_000001", 1, lambda directory: (directory / "weights").write_text("old"))
    replace = Path.replace

    def refused(path: Path, target: Path) -> Path:
        if path.name == "critic.tmp":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(ProtocolError, match="make room"):
        store.save("run-step_000001", 2, lambda directory: (directory / "weights").write_text("new"))
    directory, record = store.verified("run-step_000001", None)
    assert record.critic_step == 1 and (directory / "weights").read_text() == "old"


def test_pruning_leaves_the_actors_checkpoint_alone(tmp_path: Path) -> None:
    store = CriticCheckpointStore(tmp_path)
    for name in ("run-step_000001", "run-step_000002"):
        store.save(name, 1, lambda directory: (directory / "weights").write_text("w"))
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
        pruned = store.commit(name, keep=1)
    assert pruned == ["run-step_000001"]
    assert (tmp_path / "checkpoints/run-step_000001/manifest.json").exists()
    assert not (tmp_path / "checkpoints/run-step_000001/critic").exists()


def test_pruning_leaves_other_runs_alone(tmp_path: Path) -> None:
    store = CriticCheckpointStore(tmp_path)
    for name in ("old-step_000001", "new-step_000001", "new-step_000002"):
        store.save(name, 1, lambda directory: (directory / "weights").write_text("w"))
        pruned = store.commit(name, keep=1)
    assert pruned == ["new-step_000001"]
    assert CriticCheckpointStore(tmp_path).committed == ["old-step_000001", "new-step_000002"]
    assert store.verified("old-step_000001", None)


@pytest.mark.parametrize("name", ["weights", "critic.json"])
def test_a_half_that_cannot_be_read_is_damaged(tmp_path: Path, name: str) -> None:
    store = CriticCheckpointStore(tmp_path)
    store.save("run-step_000001", 1, lambda directory: (directory / "weights").write_text("w"))
    make_unreadable(tmp_path / "checkpoints" / "run-step_000001" / "critic" / name)
    with pytest.raises(ProtocolError, match=f"is damaged: {name}"):
        store.verified("run-step_000001", None)


def test_a_damaged_list_of_commits_keeps_no_server_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CriticCheckpointStore(tmp_path).save("run-step_000001", 1, lambda directory: None)
    (tmp_path / "checkpoints" / "critic_committed.json").write_text('["run-st')
    store = CriticCheckpointStore(tmp_path)
    assert store.committed == [] and "critic_committed.json is damaged" in caplog.text
    store.commit("run-step_000001", keep=None)
    assert CriticCheckpointStore(tmp_path).committed == ["run-step_000001"]


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TokenConfig(token_env="SOME_TOKEN")
    assert read_token(config) is None
    monkeypatch.setenv("SOME_TOKEN", "from the environment")
    assert read_token(config) == "from the environment"
    (tmp_path / "token").write_text("from the file\n")
    config.token_file = str(tmp_path / "token")
    assert read_token(config) == "from the file"
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UserError, match="holds no usable token"):
        read_token(config)
    config.token_file = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match="does not exist"):
        read_token(config)


def test_the_token_leaves_the_environment_that_the_kernel_shows() -> None:
    """/proc/PID/environ shows what a process was started with, whatever it has unset since."""
    program = """if True:
        from pathlib import Path
        from nemo_style_rlhf.critic_service.secret import read_token
        from nemo_style_rlhf.schema.common import TokenConfig
        shown = lambda: Path("/proc/self/environ").read_bytes()
        assert b"SOME_TOKEN=s3cret" in shown() and b"BESIDE=it" in shown()
        assert read_token(TokenConfig(token_env="SOME_TOKEN")) == "s3cret"
        assert read_token(TokenConfig(token_env="SOME_TOKEN")) == "s3cret"
        assert b"s3cret" not in shown() and b"BESIDE=it" in shown()
    """
    environment = {**os.environ, "SOME_TOKEN": "s3cret", "BESIDE": "it"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_stands_in_brackets(host: str) -> None:
    assert Connection(host, 5567, token=None, retries=0).address == "[::1]:5567"


def test_a_body_may_take_longer_to_send_than_a_connection_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(1)
            size = len(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps({"error": f"[conflict] {size} bytes"}).encode()
            self.send_response(409)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.1)
    tokens = np.zeros(2**22, dtype=np.int32)  # more than both ends of a socket hold
    with HTTPServer(("127.0.0.1", 0), Slow) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        threading.Thread(target=server.handle_request, daemon=True).start()
        client = Connection("127.0.0.1", server.server_port, token=None, retries=0)
        with pytest.raises(ProtocolError, match=r"conflict.* 16\d{6} bytes"):
            client.call(protocol.INFER, protocol.infer_tensors([tokens], protocol.Wanted("both")), timeout_s=30)
        client.close()
