"""Another user of the host sees nothing of a server. Only root can look as another user does."""

import json
import secrets
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from tests.support.critic_server import TOKEN_ENV, CriticServer

pytestmark = pytest.mark.more

TOKEN = secrets.token_hex(16)
STRANGER = r"""
import glob, json, os, socket, sys, urllib.request
secrets, pids, port = json.loads(sys.stdin.read())
found = []
def look(path):
    try:
        content = open(path, "rb").read()
    except OSError:
        return
    found.extend((path, name) for name, secret in secrets.items() if secret.encode() in content)
for pid in pids:
    for name in ("cmdline", "environ", "maps"):
        look(f"/proc/{pid}/{name}")
    for descriptor in range(64):
        look(f"/proc/{pid}/fd/{descriptor}")
for path in glob.glob("/dev/shm/*") + glob.glob("/tmp/**", recursive=True):
    if os.path.isfile(path):
        look(path)
listening = set()
for pid in pids:
    for line in open(f"/proc/{pid}/net/unix").read().splitlines()[1:]:
        if len(line.split()) > 7:
            listening.add(line.split()[7])
for path in listening:
    if path.startswith("/") and "nsr" in path:
        try:
            socket.socket(socket.AF_UNIX).connect(path)
            found.append((path, "connected"))
        except OSError:
            pass
for path in ("/v2/models/critic_status/infer", "/v2/repository/index", "/v2/health/ready", "/metrics"):
    try:
        answer = urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=b'{"inputs": []}', timeout=5)
        found.append((path, answer.status))
    except urllib.error.HTTPError as error:
        if error.code != 401:
            found.append((path, error.code))
print(json.dumps(found))
"""


def test_another_user_of_the_host_reads_no_secret_and_gets_no_answer(
    tmp_path: Path, reward_model: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, environments, descriptors, shared memory, files, sockets, ports; as nobody, while calls with the secrets run."""
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    metrics = [f"server.metrics={backend == 'pytriton'}"]
    server = CriticServer(tmp_path, reward_model, metrics, {TOKEN_ENV: TOKEN}, backend=backend).start()
    with closing(server), server.client() as critic:
        look_as_nobody(server, critic)
        for segment in Path("/dev/shm").glob(f"*{server.process.pid}-*"):
            assert segment.stat().st_mode & 0o077 == 0, segment


def look_as_nobody(server: CriticServer, critic: RemoteCritic) -> None:
    lease = critic._require_lease()
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            critic.commit("test-step_000001", 0)  # its JSON, lease included, goes through shared memory

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        pids = [process.pid for process in server.processes()]
        known = {"token": TOKEN, "lease": lease}
        looked = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", STRANGER],
            input=json.dumps([known, pids, server.port]), capture_output=True, text=True, timeout=60, cwd="/",
        )  # fmt: skip
        assert looked.returncode == 0, looked.stderr
        assert json.loads(looked.stdout) == []
    finally:
        stop.set()
        busy.join()
