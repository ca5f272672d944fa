"""What clients and files can do to the server's state: names, other runs' checkpoints, pickles, parts that nobody completes."""

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.client import parse_json
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.messages import Code, ProtocolError
from tests.support.attacks import Attack
from tests.support.critic_server import START, CriticServer, anonymous, sequences, train_batch
from tests.support.train_parts import parts_of, send

MIB = 2**20
ATTACK = checkpoint_id("test", 666)


@pytest.fixture
def checkpoint(shared_server: CriticServer, critic: RemoteCritic) -> Iterator[Path]:
    """The critic checkpoint ``ATTACK``, which a test may spoil; the server must serve on."""
    critic.save(ATTACK).result()
    folder = shared_server.output_dir / "checkpoints" / ATTACK
    yield folder / "critic"
    shutil.rmtree(folder)
    critic.restore(START, None)
    assert critic.infer(sequences(0)).result().values
    assert shared_server.process.poll() is None


def weights(checkpoint: Path) -> Path:
    (path,) = checkpoint.rglob("*model_states.pt")
    return path


def sign(checkpoint: Path) -> dict[str, str]:
    """Have the checkpoint's record name all its files with their digests, as somebody who may write there can."""
    record = json.loads((checkpoint / "critic.json").read_text())
    record["digests"] = {
        path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != "critic.json"
    }
    (checkpoint / "critic.json").write_text(json.dumps(record))
    return record["digests"]


def refusal(ask: Callable[[], object]) -> ProtocolError:
    with pytest.raises(ProtocolError) as refused:
        ask()
    assert "\n" not in refused.value.message and "/tmp" not in refused.value.message
    return refused.value


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_a_pickle_in_a_checkpoint_is_not_run(
    checkpoint: Path, critic: RemoteCritic, tmp_path: Path, signed: bool, asked: bool
) -> None:
    """Whether its digest is on record and asked for or not."""
    marker = tmp_path / "marker"
    weights(checkpoint).write_bytes(pickle.dumps({"module": Attack(marker)}))
    digests = sign(checkpoint) if signed else json.loads((checkpoint / "critic.json").read_text())["digests"]
    refused = refusal(lambda: critic.restore(ATTACK, digests if asked else None))
    assert not marker.exists()
    assert refused.code is Code.CONFLICT and f"checkpoint {ATTACK} is damaged: " in refused.message


@pytest.mark.parametrize("in_zip", [False, True])
def test_nor_is_one_that_torch_wrote(checkpoint: Path, critic: RemoteCritic, tmp_path: Path, in_zip: bool) -> None:
    marker, path = tmp_path / "marker", weights(checkpoint)
    content = torch.load(path, weights_only=True)
    torch.save({**content, "global_steps": Attack(marker)}, path, _use_new_zipfile_serialization=in_zip)
    sign(checkpoint)
    refused = refusal(lambda: critic.restore(ATTACK, None))
    assert not marker.exists()
    assert path.name in refused.message and "something else than tensors and plain values" in refused.message


def test_a_refused_restore_changes_nothing(checkpoint: Path, critic: RemoteCritic, tmp_path: Path) -> None:
    """Not even where the model's file is whole and another is not."""
    (weights(checkpoint).parent / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(
        pickle.dumps(Attack(tmp_path / "x"))
    )
    sign(checkpoint)
    critic.train(train_batch(1), step=1).result()
    before = critic.infer(sequences(1)).result()
    refusal(lambda: critic.restore(ATTACK, None))
    after = critic.infer(sequences(1)).result()
    np.testing.assert_array_equal(np.concatenate(after.values), np.concatenate(before.values))
    assert after.critic_steps == {1}


def test_a_file_that_the_record_does_not_list_is_refused_by_name(checkpoint: Path, critic: RemoteCritic) -> None:
    (checkpoint / "state" / "surplus.bin").write_bytes(b"x")
    assert "surplus.bin is none of its files" in refusal(lambda: critic.restore(ATTACK, None)).message


def test_a_link_in_a_checkpoint_is_refused_by_name(checkpoint: Path, critic: RemoteCritic, tmp_path: Path) -> None:
    path = weights(checkpoint)
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    assert f"{path.name} is no plain file" in refusal(lambda: critic.restore(ATTACK, None)).message


def test_a_checkpoint_that_is_a_link_is_refused(checkpoint: Path, critic: RemoteCritic, tmp_path: Path) -> None:
    shutil.move(checkpoint, tmp_path / "elsewhere")
    checkpoint.symlink_to(tmp_path / "elsewhere")
    assert "critic is no plain folder" in refusal(lambda: critic.restore(ATTACK, None)).message


@pytest.mark.parametrize("record", ["[]", '{"critic_step": 0, "digests": []}', '{"critic_step": "0", "digests": {}}',
                                    '{"critic_step": 0, "digests": {"../../x": "y"}, "critic": 1}'])  # fmt: skip
def test_a_record_that_is_none_is_damage(checkpoint: Path, critic: RemoteCritic, record: str) -> None:
    (checkpoint / "critic.json").write_text(record)
    assert f"checkpoint {ATTACK} is damaged: critic.json" in refusal(lambda: critic.restore(ATTACK, None)).message


def test_commits_that_name_no_checkpoints_are_forgotten(make_server: Callable[..., CriticServer]) -> None:
    """The last one names a file of the next start."""
    server = make_server()
    committed = server.output_dir / "checkpoints" / "critic_committed.json"
    committed.parent.mkdir()
    committed.write_text('["test-step_000001", "x/../../../../escaped"]')
    with server.start().client() as critic:
        assert critic.status().last_committed is None
    assert "critic_committed.json is damaged" in server.log.read_text()
    assert [path.name for path in (server.output_dir / "configs").iterdir()] == ["001_step_000000.yaml"]


# --- names ------------------------------------------------------------------------------------------------------------

NAMES = [
    "critic_committed.json", "a", "a-1", "test-step_1", "test-step_0000001", "test-step_00000a", "TEST-step_000001",
    "test-step_000001.json", "-step_000001", "a.b-step_000001", "../test-step_000001", "a/b-step_000001", "a\\b-step_000001",
    "c:-step_000001", "nul", "test-step_000001 ", "test-step_000001\n", "tést-step_000001", f"test-step_{chr(0x661) * 6}",
    f"{'a' * 41}-step_000001", f"test-step_{10**15}", "", 1, None,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_checkpoint_has_one_form_of_name(shared_server: CriticServer, critic: RemoteCritic, name: str) -> None:
    before = sorted(path.name for path in (shared_server.output_dir / "checkpoints").iterdir())
    for ask in (
        lambda: critic.save(name, export=True).result(), lambda: critic.commit(name, 0), lambda: critic.restore(name, None)
    ):  # fmt: skip
        with pytest.raises(ProtocolError) as refused:
            ask()
        assert refused.value.code is Code.INVALID
        assert "checkpoint_id is " in refused.value.message and "expected <run_id>-step_NNNNNN" in refused.value.message
    assert sorted(path.name for path in (shared_server.output_dir / "checkpoints").iterdir()) == before
    assert critic.save(START).result()["critic_step"] == 0
    critic.commit(START, keep=100)


@pytest.mark.parametrize("name", ["a-b", "a.b", "a/b", "A", "", "é", "a b", "a" * 41, 1])
def test_a_run_has_one_form_of_name(critic: RemoteCritic, name: str) -> None:
    with pytest.raises(ProtocolError, match=r"\[invalid\].*run_id is .*expected 1 to 40 letters a-z and digits"):
        critic.acquire(name)
    assert critic.status().lease_holder == "test"


# --- other runs -------------------------------------------------------------------------------------------------------


def test_a_lease_changes_the_checkpoints_of_its_own_run_alone(make_server: Callable[..., CriticServer]) -> None:
    server = make_server().start()
    theirs = checkpoint_id("victim", 1)
    with server.client("victim") as victim:
        files = victim.save(theirs, export=True).result()["files"]
        victim.commit(theirs, keep=1)
    with server.client("other") as other:
        for ask in (
            lambda: other.commit(theirs, keep=0),
            lambda: other.commit(checkpoint_id("victim", 2), keep=0),
            lambda: other.commit(theirs, keep=5),
            lambda: other.save(theirs).result(),
            lambda: other.restore(theirs, files),
        ):
            with pytest.raises(ProtocolError, match="is of the run victim, the lease of the run other") as refused:
                ask()
            assert refused.value.code is Code.CONFLICT
        other.save(checkpoint_id("other", 1)).result()
        assert other.commit(checkpoint_id("other", 1), keep=0) == [checkpoint_id("other", 1)]
    with server.client("victim") as victim:  # a resumed run has the id that it had
        assert victim.status().last_committed == theirs
        assert victim.restore(theirs, files) == 0
    assert (server.output_dir / "exports" / theirs / "critic").is_dir()


# --- parts ------------------------------------------------------------------------------------------------------------


def resident(server: CriticServer) -> int:
    return anonymous(psutil.Process(server.process.pid))


def big_part(critic: RemoteCritic, part: int, *, tokens: int = MIB, step: int = 1) -> dict:
    """16 bytes per token, in sequences of 128."""
    lengths = np.full(tokens // 128, 128, dtype=np.int32)
    mask = np.ones(tokens, dtype=np.float32)
    mask[np.cumsum(lengths) - 1] = 0
    arrays = (np.full(tokens, part, np.int32), lengths, *(np.ones(tokens, np.float32) for _ in range(2)), mask)
    plan = messages.json_tensor({"lease": critic._require_lease(), "step": step, "part": part, "parts": 1024})
    return {spec.name: tensor for spec, tensor in zip(protocol.TRAIN.inputs, (*arrays, plan), strict=True)}


def test_parts_that_nobody_completes_have_a_bound_and_go_with_the_lease(
    make_server: Callable[..., CriticServer],
) -> None:
    bound = 200 * MIB
    server = make_server(f"server.max_staged_bytes={bound}")
    server.cold = True
    with server.start().client() as critic:
        send(critic, big_part(critic, 1))  # what a call takes for itself is there
        critic.acquire("test")
        before = resident(server)
        for part in range(1, 13):
            send(critic, big_part(critic, part))
        assert resident(server) - before > 150 * MIB
        refused = refusal(lambda: send(critic, big_part(critic, 13)))
        assert refused.code is Code.INVALID
        numbers = [int(number) for number in re.findall(r"\d{6,}", refused.message)]
        assert numbers[0] > bound == numbers[1] and "server.max_staged_bytes" in refused.message
        assert send(critic, big_part(critic, 12)) == {"staged": 12, "parts": 1024}  # repeated, it takes nothing more
        assert resident(server) - before < bound + 60 * MIB
        critic.acquire("test")
        assert resident(server) - before < 40 * MIB
        critic.train(train_batch(1), step=1).result()


def test_a_step_that_can_never_be_staged_is_not_sent(make_server: Callable[..., CriticServer]) -> None:
    server = make_server("server.max_request_bytes=4096", "server.max_staged_bytes=8192").start()
    with server.client() as critic:
        assert critic.status().max_staged_bytes == 8192
        critic.train(train_batch(1), step=1).result()
        with pytest.raises(
            UserError, match=r"a train step of \d+ bytes is more than .* takes \(8192\): .*max_staged_bytes"
        ):
            critic.train(train_batch(2, count=64), step=2).result()
        critic.train(train_batch(1), step=2).result()


def test_an_incomplete_step_is_gone_when_the_critic_stands_elsewhere(critic: RemoteCritic) -> None:
    first, _ = parts_of(critic, step=1)
    send(critic, first)
    critic.restore(START, None)
    assert send(critic, parts_of(critic, step=1)[1]) == {"staged": 1, "parts": 2}
    assert parse_json(critic._connection.call(protocol.STATUS, {}, timeout_s=60))["critic_step"] == 0
