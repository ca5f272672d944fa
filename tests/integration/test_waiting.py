"""How an actor that waits for a server says so, on a terminal and in a log file."""

import os
import pty
import re
import select
import subprocess
import time

import pytest

from nemo_style_rlhf.critic_service import client
from nemo_style_rlhf.critic_service.remote_reward import RemoteRewardModel
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.reward import RewardServerConfig
from tests.support.paths import ACTOR_PYTHON, ROOT

PROGRAM = """
import sys
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
try:
    with RemoteCritic(RemoteCriticConfig(port=9, wait_for_server_s=2.2)) as critic:
        critic.wait_until_ready(lambda line: print("LOGGED", file=sys.stderr))
except UserError as error:
    print("error:", error, file=sys.stderr)
"""


def test_a_terminal_has_one_line_that_updates() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "300"}
    process = subprocess.Popen(
        [ACTOR_PYTHON, "-c", PROGRAM], stderr=theirs, stdout=theirs, stdin=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    process.wait()
    text = shown.decode()
    assert (
        text.count("waiting for the critic server at 127.0.0.1:9, 2 s left; start it with .venv-server/bin/python") >= 1
    )
    assert "servers/serve_ppo_critic.py run.output_dir=OUTPUT_DIR model.path=REWARD_MODEL server.port=9" in text
    assert text.count("waiting for") >= 2 and "LOGGED" not in text
    waiting, _, _ = text.partition("error:")
    assert waiting.count("\n") <= 1 and waiting.count("\x1b[2K") >= 1  # each takes the place of the one before


def test_a_log_file_is_told_at_the_start_and_then_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(client, "TOLD_AFTER_S", (0.0, 1.0))  # the next times are 2, 3, ... here
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    config = RewardServerConfig(port=9, wait_for_server_s=1.9)
    started = time.monotonic()
    with RemoteRewardModel(config) as server, pytest.raises(UserError, match="no reward server answers at 127"):
        server.wait_until_ready(lines.append)
    assert time.monotonic() - started >= 1.9
    first, second = lines
    assert first.startswith("waiting for the reward server at 127.0.0.1:9, 2 s left; start it with ")
    assert first.endswith(".venv-server/bin/python servers/serve_reward_model.py model.path=REWARD_MODEL server.port=9")
    assert re.search(r" [01] s left", second)


def test_the_log_files_times_are_minutes() -> None:
    assert [client._told_after(times) / 60 for times in range(8)] == [0, 1, 2, 5, 10, 20, 30, 40]
