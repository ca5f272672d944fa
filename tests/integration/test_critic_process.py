"""Rules 7 and 8: a locked door, an honest death; and what the command line refuses."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path

import psutil
import pytest
import requests

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.critic_service.remote_reward import RemoteRewardModel
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.wire.connection import ServerRestarted, ServerUnreachable
from nemo_style_rlhf.wire.messages import ProtocolError
from tests.support.critic_server import (
    START,
    TOKEN_ENV,
    CriticServer,
    left_of,
    long_batch,
    only_pytriton,
    refusal,
    segments_of,
    sequences,
    train_batch,
    wait_until_busy,
)
from tests.support.models import save_reward_model
from tests.support.paths import ROOT, SERVER_PYTHON
from tests.support.processes import start_server

TOKEN = "b2d1-a-shared-secret"


# --- rule 7: locked by default ----------------------------------------------------------------------------------------


def test_rule_7_listens_on_loopback_only_and_keeps_tritons_own_doors_shut(shared_server: CriticServer) -> None:
    tree = [
        psutil.Process(shared_server.process.pid),
        *psutil.Process(shared_server.process.pid).children(recursive=True),
    ]
    addresses = {
        connection.laddr.ip
        for process in tree
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN"
    }
    assert addresses == {"127.0.0.1"}
    base = f"http://127.0.0.1:{shared_server.port}/v2"
    for path in ("/repository/index", "/repository/models/critic_infer/unload"):
        assert requests.post(base + path, timeout=10).status_code == 401
    for path in ("/systemsharedmemory/status", "/trace/setting", "/logging"):
        assert requests.get(base + path, timeout=10).status_code == 401


@pytest.mark.more
def test_it_starts_wherever_temporary_files_are(reward_model: Path, tmp_path: Path) -> None:
    """A socket's path has 107 characters at most, and schedulers make folders of 60."""
    long = tmp_path / ("d" * 60)
    long.mkdir()
    (tmp_path / "critic").mkdir()
    words = [f"model.path={reward_model}", "model.dtype=float32"]
    server, _ = start_server(tmp_path / "critic", *words, cold=[], environment={"TMPDIR": str(long)})
    assert server.terminate() == 0 and list(long.iterdir()) == []


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory, reward_model: Path, backend: str) -> Iterator[CriticServer]:
    """Bound to every address, with a token from a file, serving values only."""
    directory = tmp_path_factory.mktemp("open_server")
    (directory / "secret").write_text(TOKEN + "\n")
    overrides = ["server.host=0.0.0.0", f"server.token.token_file={directory}/secret"]
    overrides.append("reward_model.combine_rm_and_critic_server=false")
    server = CriticServer(directory, reward_model, overrides, backend=backend).start()
    yield server
    server.close()


def test_rule_7_a_token_is_wanted_before_anything_else(
    open_server: CriticServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is in no process's arguments."""
    for environment in (None, "wrong"):
        if environment is not None:
            monkeypatch.setenv(TOKEN_ENV, environment)
        with (
            RemoteCritic(open_server.config()) as critic,
            pytest.raises(UserError, match=rf"127\.0\.0\.1:{open_server.port} refused the token"),
        ):
            critic.wait_until_ready(lambda line: None)
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    with open_server.client() as critic:
        critic.infer(sequences(1), want="values").result()
    for process in psutil.Process(open_server.process.pid).children(recursive=True):
        assert TOKEN not in " ".join(process.cmdline())


def test_critic_only_serves_no_rewards(open_server: CriticServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    with open_server.client() as critic:
        assert critic.infer(sequences(1), want="values").result().rewards is None
        with pytest.raises(
            ProtocolError, match=r"request\.want is both but this server has no reward model: ask for values"
        ):
            critic.infer(sequences(1)).result()
        status = critic.status()
        assert status.roles == ["critic"]
        with pytest.raises(UserError, match="serves critic, the actor needs reward too"):
            critic.handshake(tokenizer_digest=status.tokenizer_digest, vocab_size=status.vocab_size, needs_rewards=True)
    with RemoteRewardModel(open_server.config()) as client:
        with pytest.raises(UserError, match="serves critic, the actor needs reward too"):
            client.score_text(["w1"], ["w2"]).result()


def test_rule_7_refuses_to_open_wider_without_a_token(make_server) -> None:
    assert "server.host=0.0.0.0 would open the server to the network without a token" in refusal(
        make_server("server.host=0.0.0.0")
    )


# --- rule 8: dies honestly --------------------------------------------------------------------------------------------


def test_rule_8_sigterm_lets_a_running_call_finish(make_server) -> None:
    server = make_server().start()
    with server.client(retries=0) as critic:
        training = critic.train(long_batch(60), step=1)
        wait_until_busy(critic)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ServerUnreachable, match="is stopping"):
            critic.commit("test-step_000001", 1)  # nothing new is begun meanwhile
        assert training.result()["optimizer_steps"] == 60
        assert server.process.wait(30) == 0
    assert not server.ready_file.exists()


@pytest.mark.parametrize(("dry_run", "code"), [(False, 0), (True, 128 + signal.SIGTERM)])
def test_rule_8_sigterm_ends_a_server_that_still_loads(dry_run: bool, code: int, tmp_path: Path) -> None:
    program = f"""
import os, signal, time
from nemo_style_rlhf.critic_service.process import serve
from nemo_style_rlhf.schema.common import RunConfig
from nemo_style_rlhf.schema.critic import CriticServerConfig

def load(device, directory):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)

serve(RunConfig(output_dir={str(tmp_path)!r}, device="cpu", dry_run={dry_run}), CriticServerConfig(), None, load)
"""
    ended = subprocess.run([SERVER_PYTHON, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert "received SIGTERM" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.more
def test_rule_8_sigterm_abandons_a_call_that_takes_too_long(make_server) -> None:
    server = make_server("server.shutdown_grace_s=1").start()
    with server.client(retries=1) as critic:
        critic.save("test-step_000001").result()
        training = critic.train(long_batch(5000), step=1)
        wait_until_busy(critic)
        children = psutil.Process(server.process.pid).children(recursive=True)
        started = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - started < 20
        with pytest.raises((UserError, ProtocolError)):
            training.result()
    assert not left_of(children)
    assert not list(Path("/dev/shm").glob(f"*{server.process.pid}-*"))


@pytest.mark.more
def test_rule_8_sigterm_leaves_nothing_though_a_client_holds_its_connection(make_server) -> None:
    server = make_server().start()
    with server.client() as critic:
        critic.infer(sequences(1)).result()
        children = psutil.Process(server.process.pid).children(recursive=True)
        started = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - started < 10
    assert "Traceback" not in server.log.read_text()
    assert not left_of(children)
    assert not list(Path("/dev/shm").glob(f"*{server.process.pid}-*"))


@only_pytriton
@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.more), pytest.param(2, marks=pytest.mark.more)])
def test_rule_8_a_dead_tritonserver_is_noticed(make_server, depth: int) -> None:
    """And the death of an endpoint's process, and of one that this has."""
    server = make_server().start()
    victim = server.tritonserver()
    for _ in range(depth):
        victim = victim.children()[-1]
    with server.client(retries=1) as critic:
        victim.kill()
        assert server.process.wait(15) == 1
        with pytest.raises(ServerUnreachable):
            critic.status()
    assert "tritonserver or a process of its died" in server.log.read_text()


@pytest.mark.parametrize(
    ("backend", "name"),
    [("pytriton", "http.sock"), ("pytriton", "control.sock"), ("native", "http.sock")],
    indirect=["backend"],
)
def test_rule_8_a_removed_socket_is_noticed(make_server, name: str) -> None:
    """Programs that clean up temporary files remove those that nobody has opened for long."""
    server = make_server().start()
    (folder,) = Path(tempfile.gettempdir()).glob(f"nsr{server.process.pid}-*")
    (folder / name).unlink()
    assert server.process.wait(15) == 1
    assert f"or a socket was removed from {folder}" in server.log.read_text()


@only_pytriton
@pytest.mark.more
def test_rule_8_an_endpoint_that_hangs_does_not_outlive_a_dead_tritonserver(make_server) -> None:
    server = make_server().start()
    children = psutil.Process(server.process.pid).children(recursive=True)
    tritonserver = server.tritonserver()
    tritonserver.children()[-1].suspend()
    tritonserver.kill()
    assert server.process.wait(15) == 1
    assert not left_of(children)


@pytest.mark.more
def test_rule_8_an_endpoint_and_a_door_that_hang_do_not_outlive_both_parents_and_nothing_is_left(make_server) -> None:
    """These are killed at once, before either could notice that the other has gone."""
    server = make_server().start()
    everyone = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    segments, folders = segments_of(everyone), list(Path(tempfile.gettempdir()).glob(f"nsr{server.process.pid}-*"))
    assert folders
    hanging = [next(process for process in everyone if "front_door" in " ".join(process.cmdline()))]
    killed = everyone[:1]
    if server.backend == "pytriton":
        assert segments
        hanging.append(server.tritonserver().children()[-1])
        killed.append(server.tritonserver())
    for process in hanging:
        process.suspend()
    for process in killed:
        process.kill()
    assert not left_of(everyone)
    deadline = time.monotonic() + 5
    while left := [path for path in (*segments, *folders) if path.exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.more
def test_a_server_that_was_killed_gives_its_port_to_the_next(make_server) -> None:
    """Its Triton outlives it for some seconds, because a client keeps its connection."""
    server = make_server().start()
    with server.client() as critic:
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        server.start()
        with pytest.raises(ServerRestarted):
            critic.infer(sequences(1)).result()


@pytest.mark.more
def test_rule_8_an_infinite_loss_ends_the_server_and_spares_the_checkpoint(make_server, tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    server = make_server(environment={"SLOW_DISK": str(tmp_path / "slow"), "SLOW_DISK_S": "2"}).start()
    with server.client(retries=2) as critic:
        good = critic.save("test-step_000006")
        batch = train_batch(1)
        for returns in batch.returns:
            returns[:] = 1e30
        with pytest.raises(ProtocolError, match=r"\[non_finite\].*train step 1 failed because the loss is inf"):
            critic.train(batch, step=1).result()
        assert not good.done()
        files = good.result()["files"]
        assert server.process.wait(20) == 1
        with pytest.raises(ServerUnreachable):
            critic.status()
    (tmp_path / "slow").unlink()
    server.start()
    with server.client() as critic:
        assert critic.restore("test-step_000006", files) == 0


@pytest.mark.more
def test_a_checkpoint_of_another_critic_is_refused_and_the_server_goes_on(
    shared_server: CriticServer, make_server
) -> None:
    server = make_server("model.lora.rank=2")
    shutil.copytree(shared_server.output_dir / "checkpoints", server.output_dir / "checkpoints")
    with server.start().client() as critic:
        with pytest.raises(
            ProtocolError, match=r"a critic with model\.lora\.rank 0, this one has 2: start it as it was"
        ):
            critic.restore(START, None)
        assert critic.infer(sequences(0)).result().values


@pytest.mark.more
def test_rule_8_the_actors_shutdown_ends_it_with_0(make_server) -> None:
    server = make_server().start()
    with server.client() as critic:
        critic.shutdown()
    assert server.process.wait(30) == 0


# --- the command line -------------------------------------------------------------------------------------------------


def test_dry_run_passes_and_leaves_nothing(make_server) -> None:
    server = make_server()
    process = subprocess.run(server.command("--dry-run"), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "dry run passed: critic and reward" in process.stderr
    assert list(server.output_dir.iterdir()) == []


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_the_trainers_environment_has_no_pytriton(make_server) -> None:
    server = make_server()
    said = refusal(server, "server.backend=pytriton")
    assert f"{server.python} has no pytriton, which server.backend=pytriton needs" in said
    assert "give server.backend=native" in said
    assert "server.metrics=True" in refusal(server, "server.metrics=true")


def test_wrong_use_is_one_sentence(make_server, tmp_path: Path) -> None:
    server = make_server()
    two_labels = save_reward_model(tmp_path / "two_labels", num_labels=2)
    assert "has 2 labels and label_weights are none" in refusal(server, f"model.path={two_labels}")
    assert "server.prot" in refusal(server, "server.prot=1")
    assert "nowhere: there is no such folder" in refusal(server, f"model.path={tmp_path}/nowhere")


@only_pytriton
def test_a_library_that_tritonserver_lacks_is_named_before_a_model_is_loaded(make_server) -> None:
    libraries = next(SERVER_PYTHON.parents[1].glob("lib/python3*/site-packages/nvidia_pytriton.libs"))
    without = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs tmpfs {libraries} && exec "$0" "$@"',
    ]
    server = make_server()
    done = subprocess.run([*without, *server.command()], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "loading models" not in done.stderr
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.match(
        r"error: tritonserver of PyTriton links lib\S+, .*which this host lacks: install the package that", said
    )


def test_pythons_own_library_is_named_by_the_package_that_brings_it() -> None:
    """Debian's python3 comes without it: the server told after two minutes that tritonserver did not answer."""
    lacking = next(
        version for version in ("3.8", "3.9", "3.10", "3.12", "3.13") if not find_library(f"python{version}")
    )
    code = f"from nemo_style_rlhf.critic_service.backend import require_libraries; require_libraries('{lacking}')"
    done = subprocess.run([SERVER_PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = (
        f"libpython{lacking}.so.1.0, which this host lacks: install the package that brings it (libpython{lacking} on"
    )
    assert said in done.stderr.splitlines()[-1]


@only_pytriton
def test_tritonserver_sees_no_gpu_and_the_server_that_computes_does(shared_server: CriticServer) -> None:
    """It would take a context and a pool of each, 0.57 GiB of an H200."""
    tritons = [shared_server.tritonserver(), *shared_server.tritonserver().children(recursive=True)]
    assert len(tritons) > 1 and {process.environ()["CUDA_VISIBLE_DEVICES"] for process in tritons} == {""}
    assert "CUDA_VISIBLE_DEVICES" not in psutil.Process(shared_server.process.pid).environ()


def test_a_port_in_use_is_one_sentence(make_server, shared_server: CriticServer) -> None:
    server = make_server()
    server.port = shared_server.port
    assert f"server.port={shared_server.port} on 127.0.0.1 cannot be bound" in refusal(server)
