"""A gateway whose process stands still costs a minute, and no sample."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_style_rlhf.agents import gateway
from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.events import Called
from nemo_style_rlhf.schema.gateway import GatewayConfig
from tests.support.agents import Trainer, program
from tests.support.processes import process_below
from tests.unit.agents.chat_templates import CHATML, encoder


def test_a_gateway_that_hangs_is_killed_and_begins_its_episodes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At no charge, with the same samples; one that waits for the policy does not hang."""
    monkeypatch.setattr(gateway, "SILENT_LOOKS", 3)
    asked: list[int] = []

    def policy(call: Called, ids: Sequence[int], seed: int) -> Action:
        asked.append(call.attempt)
        if len(asked) == 1:
            time.sleep(5)
        elif len(asked) == 2:
            process = process_below(os.getpid(), "gateway_process")
            process.suspend()
        return ours.sample(call, ids, seed)

    command = program(tmp_path / "my_agent.py", "ask(user('a'))\nask(user('b'))\nprint(1)", python=sys.executable)
    with Trainer(encoder(CHATML), GatewayConfig(command=command), attempts=1, policy=policy) as ours:
        assert ours.gateway.waits_for(0) == " ".join(command)
        ours.run(Task("q"))
        assert asked == [1, 1, 2, 2] and ours.ended[0].observation.reward == 1.0
        assert [(each.attempt, each.last, each.charged) for each in ours.failed[0]] == [(1, False, False)]
        assert "the gateway's process has said nothing for 3 s: it is killed" in caplog.text
        assert ours.rows(0) == ours.sessions[0, 1].rows()
