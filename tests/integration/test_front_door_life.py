"""How a server and its front door begin and end together."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import requests

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.wire import messages
from tests.chaos.run import OWN_SHM
from tests.support.critic_server import runs, segments_of
from tests.support.paths import ROOT
from tests.support.processes import start_server

pytestmark = pytest.mark.more


def test_a_dead_door_ends_the_server(make_server) -> None:
    server = make_server().start()
    door = next(process for process in server.processes() if "front_door" in " ".join(process.cmdline()))
    door.kill()
    assert server.process.wait(20) == 1
    assert "the front door" in server.log.read_text()


def test_a_killed_server_takes_its_door_along_and_the_next_one_tidies_up(make_server) -> None:
    """All but an endpoint that hangs are killed at once, the supervisor too, as a batch system or nobody's luck may do it."""
    server = make_server().start()
    pid, everyone = server.process.pid, server.processes()
    left = [*segments_of(everyone), *Path(tempfile.gettempdir()).glob(f"nsr{pid}-*")]
    hanging = [server.tritonserver().children()[-1]] if server.backend == "pytriton" else []
    for process in everyone:
        process.suspend() if process in hanging else process.kill()
    server.process.wait()
    assert all(map(runs, hanging)) and any(path.exists() for path in left)
    server.port = 0
    server.start()
    assert not any(path.exists() for path in left)
    assert not any(map(runs, hanging))


def test_a_server_that_does_not_see_another_leaves_its_segments_alone(tmp_path, reward_model) -> None:
    """As in two containers that share /dev/shm, but not their process ids."""
    overrides = ["model.dtype=float32", f"model.path={reward_model}"]
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    first, _ = start_server(folders[0], *overrides, cold=OWN_SHM)
    try:
        shared_memory = Path(f"/proc/{first.pid}/root/dev/shm")
        segments = {path.name for path in shared_memory.iterdir()}
        inside = ["nsenter", "--target", str(first.pid), "--user", "--mount", "--preserve-credentials"]
        apart = [*inside, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", f"--wd={ROOT}"]
        second, _ = start_server(folders[1], *overrides, cold=apart)
        second.kill()
        assert segments and segments <= {path.name for path in shared_memory.iterdir()}
    finally:
        first.kill()


def test_a_server_without_a_token_of_yours_makes_one(make_server, tmp_path: Path) -> None:
    server = make_server(environment={"XDG_CONFIG_HOME": str(tmp_path)}).start()
    token = tmp_path / "nemo_style_rlhf" / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    url = f"http://127.0.0.1:{server.port}/v2/models/critic_status/infer"
    assert requests.post(url, json={"inputs": []}, timeout=10).status_code == 401
    headers = {messages.TOKEN_HEADER: token.read_text()}
    assert requests.post(url, json={"inputs": []}, headers=headers, timeout=10).status_code == 200
    server.terminate()  # its folder has one server at a time
    token.chmod(0o644)
    server.port = 0
    refused = subprocess.run(
        server.command(),
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2
    assert re.search(r"token holds the token of your servers and is not yours alone: chmod 600 it", refused.stderr)


def test_it_listens_on_ipv6_too(make_server) -> None:
    server = make_server("server.host=::1").start()
    with RemoteCritic(server.config(host="::1")) as critic:
        assert critic.status().critic_step == 0
