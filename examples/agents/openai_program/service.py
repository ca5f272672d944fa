"""Serves the program of program.py to a run that trains its model: it fetches tasks, and says what each conversation earned.

    python examples/agents/openai_program/service.py URL    # with the token of the run in NSR_AGENT_TOKEN

Python and the `openai` package take a second or more to start, so one process serves all samples. A program that starts faster
can be started for every sample instead (agent.command), and needs no service.
"""

import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from openai import OpenAI
from program import converse

SIDE_BY_SIDE = 16
"""Number of concurrent conversations, as many as agent.programs."""
WAIT_S = 0.5
"""Seconds between two tries to reach a run."""


def main() -> None:
    url, token = sys.argv[1], os.environ["NSR_AGENT_TOKEN"]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        for served in [threads.submit(serve, url, token) for _ in range(SIDE_BY_SIDE)]:
            served.result()


def serve(url: str, token: str) -> None:
    """Fetch tasks and work on them until the process is ended."""
    client, http = OpenAI(base_url=f"{url}/v1", api_key=token), requests.Session()
    while True:
        try:
            serve_one(http, client, url, token)
        except requests.ConnectionError:  # the run has not begun, or is over
            time.sleep(WAIT_S)


def serve_one(http: requests.Session, client: OpenAI, url: str, token: str) -> None:
    """Fetch a task if there is one soon, work on it, and say what it earned, or why it failed."""
    given = http.post(f"{url}/sessions/next", headers=bearer(token), json={"wait_s": 20})
    given.raise_for_status()
    if given.status_code == requests.codes.no_content:
        return
    key, task = given.json()["api_key"], given.json()["task"]
    try:
        verdict, content = "reward", judged(client.with_options(api_key=key), task)
    except Exception as error:  # noqa: BLE001 of the program, and it ends only one sample
        verdict, content = "fail", {"reason": repr(error)}
    http.post(f"{url}/sessions/{verdict}", headers=bearer(key), json=content)


def judged(client: OpenAI, task: Mapping[str, Any]) -> dict[str, Any]:
    """Converse about the task's question, and return the reward of it: 1 for the right answer."""
    _, *said, last = converse(client, task["messages"][0]["content"])
    calls = sum(isinstance(message, dict) for message in said)
    return {"reward": float((last.content or "").strip() == task["label"]), "metrics": {"tool_calls": calls}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


if __name__ == "__main__":
    main()
