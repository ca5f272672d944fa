"""An attempt has seconds of its own; while a call waits for the policy, none of them pass."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nemo_style_rlhf.agents import programs
from nemo_style_rlhf.agents.api_requests import ApiError, Offer, Request
from nemo_style_rlhf.agents.environment import Observation
from nemo_style_rlhf.agents.session_registry import GatewaySession, GatewaySettings, SessionRegistry

LIMIT_S = 0.5
ANSWER = {"text": "a", "message": {}, "token_ids": [1], "logprobs": [-1.0], "truncated": False}
Served = Callable[[SessionRegistry, GatewaySession], Awaitable[None]]


def told(serve: Served) -> list[dict[str, Any]]:
    """The events of an attempt that a service has fetched, which ``serve`` makes."""
    events: list[dict[str, Any]] = []

    async def run() -> None:
        settings = GatewaySettings(-1, "", "token", (), "", 4, 4, 1000, LIMIT_S, Offer())
        registry = SessionRegistry(settings, events.append)
        registry.execute({"kind": "start", "episode": 3, "attempt": 1, "left": 1, "task": {}})
        session = await registry.next(1.0)
        assert session is not None
        await serve(registry, session)

    asyncio.run(run())
    return events


async def asked(registry: SessionRegistry, session: GatewaySession, *seconds: float) -> None:
    """Calls side by side, each of which is answered after so many seconds."""
    first = session.made
    calls = [asyncio.create_task(registry.call(session, Request("q"))) for _ in seconds]
    await asyncio.sleep(0)
    for number, after in enumerate(seconds, start=first):
        order = {"kind": "answer", "episode": 3, "attempt": 1, "call": number, "action": ANSWER, "prompt_tokens": 1}
        asyncio.get_running_loop().call_later(after, registry.execute, order)
    await asyncio.gather(*calls)


def reward(registry: SessionRegistry, session: GatewaySession) -> None:
    registry.end(session, programs.Result(Observation(reward=1.0, done=True)))


@pytest.mark.slow("waits for a policy")
def test_a_slow_policy_takes_no_time_of_its_program() -> None:
    """Neither one call after another, nor two side by side of which one waits for longer."""

    async def serve(registry: SessionRegistry, session: GatewaySession) -> None:
        await asked(registry, session, 1.5 * LIMIT_S)
        await asyncio.sleep(0.2 * LIMIT_S)
        await asked(registry, session, 0.1 * LIMIT_S, 1.5 * LIMIT_S)
        reward(registry, session)

    last = told(serve)[-1]
    assert last["kind"] == "ended" and 0.2 * LIMIT_S <= last["seconds"] < LIMIT_S


@pytest.mark.slow("waits for a program")
@pytest.mark.parametrize("own", [[1.5], [0.7, 0.7]], ids=["before", "around"])
def test_an_attempt_that_takes_longer_itself_fails(own: list[float]) -> None:
    """At once, or by what it takes around a call."""

    async def serve(registry: SessionRegistry, session: GatewaySession) -> None:
        *before, last = own
        for part in before:
            await asyncio.sleep(part * LIMIT_S)
            await asked(registry, session, 0.1 * LIMIT_S)
        await asyncio.sleep(last * LIMIT_S)
        with pytest.raises(ApiError, match="not that of a running episode"):
            await asked(registry, session, 0.1 * LIMIT_S)
        reward(registry, session)  # which comes too late

    last = told(serve)[-1]
    assert (last["kind"], last["timed_out"], last["last"]) == ("failed", True, True)
    assert f"agent.episode_timeout_s={LIMIT_S:g} seconds of its own" in last["reason"]
