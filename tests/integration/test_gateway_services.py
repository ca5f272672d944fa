"""Services fetch tasks from the gateway, and nobody gets in who has no key."""

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import psutil
import pytest

from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.events import Called
from nemo_style_rlhf.agents.gateway import Gateway
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.gateway import GatewayConfig
from tests.integration.test_gateway import learned
from tests.support.agents import OFFER, Trainer, until
from tests.support.paths import ROOT
from tests.support.processes import process_below
from tests.support.strangers import crowd
from tests.unit.agents.chat_templates import CHATML, encoder

READER = encoder(CHATML)
TOKEN = "the-token-of-the-run"


def post(url: str, key: str, body: object = None, *, raw: bytes | None = None) -> tuple[int, dict | None]:
    """Status and content of an answer."""
    data = raw if raw is not None else json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


@contextlib.contextmanager
def pulled(token_file: str, **settings) -> Iterator[tuple[Trainer, str]]:
    """A gateway of services, whose calls a thread answers, and its address."""
    config = GatewayConfig(token=TokenConfig(token_file=token_file), programs=settings.pop("programs", 16))
    with Trainer(READER, config, **settings) as ours:
        yield ours, ours.gateway.url.removesuffix("/v1")


def in_background(ours: Trainer, *tasks: Task) -> threading.Thread:
    thread = threading.Thread(target=ours.run, args=tasks)
    thread.start()
    return thread


def test_services_fetch_tasks_and_give_rewards(token_file):
    with pulled(token_file) as (ours, url):
        tasks = [Task(f"q{number}", seed=number) for number in range(12)]
        running = in_background(ours, *tasks)
        served = []

        def service() -> None:
            while (found := post(f"{url}/sessions/next", TOKEN, {"wait_s": 0.5}))[0] == 200:
                given = found[1]
                client = openai.OpenAI(base_url=given["base_url"], api_key=given["api_key"])
                asked = [{"role": "user", "content": given["task"]["prompt"]}]
                answer = client.chat.completions.create(model="any", messages=asked)
                reward = {"reward": len(answer.choices[0].message.content), "metrics": {"seed": given["task"]["seed"]}}
                assert post(f"{url}/sessions/reward", given["api_key"], reward) == (200, {})
                assert post(f"{url}/sessions/reward", given["api_key"], reward)[0] == 401
                served.append(given["api_key"])

        services = [threading.Thread(target=service) for _ in range(3)]
        for each in services:
            each.start()
        for each in (*services, running):
            each.join(60)
        assert len({*served}) == 12 and not ours.left
        for episode in range(12):
            assert ours.ended[episode].observation.metrics == {"seed": float(episode)}
            (text,) = learned(ours, episode)
            assert ours.ended[episode].observation.reward == len(text.removesuffix("<|im_end|>"))


def test_a_service_may_fail_and_gets_the_next_attempt(token_file):
    with pulled(token_file, attempts=3, episode_timeout_s=1.5) as (ours, url):
        running = in_background(ours, Task("q"))
        first = post(f"{url}/sessions/next", TOKEN)[1]
        assert post(f"{url}/sessions/fail", first["api_key"], {"reason": "no luck"}) == (200, {})
        second = post(f"{url}/sessions/next", TOKEN)[1]
        third = post(f"{url}/sessions/next", TOKEN)[1]  # the second has run out of time by then
        assert post(f"{url}/sessions/reward", second["api_key"], {"reward": 1})[0] == 401
        assert post(f"{url}/sessions/reward", third["api_key"], {"reward": 2}) == (200, {})
        running.join(30)
        assert [each["task"]["attempt"] for each in (first, second, third)] == [1, 2, 3]
        assert [each.reason for each in ours.failed[0]] == [
            "the service failed: no luck", "the service gave no reward within agent.episode_timeout_s=1.5 seconds of its own",
        ]  # fmt: skip
        assert ours.ended[0].observation.reward == 2.0


def test_a_service_that_hangs_up_while_it_waits_takes_no_task(token_file):
    with pulled(token_file, attempts=1) as (ours, url):
        request = urllib.request.Request(f"{url}/sessions/next", b"{}", {"Authorization": f"Bearer {TOKEN}"})
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(request, timeout=0.5)
        running = in_background(ours, Task("q"))
        found = post(f"{url}/sessions/next", TOKEN)[1]
        assert post(f"{url}/sessions/reward", found["api_key"], {"reward": 2}) == (200, {})
        running.join(30)
        assert ours.ended[0].attempt == 1


def test_the_example_serves_a_program_of_the_openai_package(token_file):
    """It looks the price up that the model asks for, and judges what the model says last."""

    def policy(call: Called, ids, seed) -> Action:
        first, last = call.prompt[0], call.prompt[-1]
        if "again" in first["content"] or (last["role"] == "user" and "lazy" not in last["content"]):
            calls = [{"type": "function", "function": {"name": "look_up", "arguments": '{"part": "3841"}'}}]
            return Action("", {"role": "assistant", "content": "", "tool_calls": calls}, (1,), (-1.0,))
        said = last["content"] if last["role"] == "tool" else "7"
        return Action(said, {"role": "assistant", "content": said}, (1,), (-1.0,))

    questions = ["What does part 3841 cost?", "What does part 1000 cost?", "lazy", "again and again"]
    price = str(random.Random("3841").randint(1000, 9999))
    tasks = [Task(each, messages=[{"role": "user", "content": each}], label=price) for each in questions]
    tasks[1] = replace(tasks[1], label="another")
    with pulled(token_file, policy=policy) as (ours, url):
        command = [sys.executable, str(ROOT / "examples" / "agents" / "openai_program" / "service.py"), url]
        service = subprocess.Popen(command, env={**os.environ, "NSR_AGENT_TOKEN": TOKEN})
        try:
            ours.run(*tasks)
            assert service.poll() is None
        finally:
            service.kill()
            service.wait()
        found = [ours.ended[each].observation for each in range(4)]
        assert [each.reward for each in found] == [1.0, 0.0, 0.0, 0.0]
        assert [each.metrics["tool_calls"] for each in found] == [1.0, 1.0, 0.0, 3.0]


def test_a_service_that_waits_hears_of_the_end_of_the_run(token_file):
    heard = []
    with pulled(token_file) as (_, url):
        waits = threading.Thread(target=lambda: heard.append(post(f"{url}/sessions/next", TOKEN)))
        waits.start()
        until(lambda: any(each.status == "ESTABLISHED" for each in psutil.Process().net_connections("tcp")))
    waits.join(30)
    assert heard == [(204, None)]


def test_at_most_so_many_tasks_are_out(token_file):
    with pulled(token_file, programs=2) as (ours, url):
        running = in_background(ours, *[Task("q") for _ in range(3)])
        found = [post(f"{url}/sessions/next", TOKEN, {"wait_s": 0.3}) for _ in range(3)]
        assert [status for status, _ in found] == [200, 200, 204]
        keys = [content["api_key"] for _, content in found[:2]]
        assert post(f"{url}/sessions/reward", keys[0], {"reward": 1})[0] == 200
        last = post(f"{url}/sessions/next", TOKEN)[1]["api_key"]
        for key in (keys[1], last):
            assert post(f"{url}/sessions/reward", key, {"reward": 1})[0] == 200
        running.join(30)
        assert not ours.left


# --- who gets in ------------------------------------------------------------------------------------------------------


def test_only_keys_open_and_each_its_own_door(token_file):
    with pulled(token_file) as (ours, url):
        running = in_background(ours, Task("q"))
        key = post(f"{url}/sessions/next", TOKEN)[1]["api_key"]
        asked = {"messages": [{"role": "user", "content": "hello"}]}
        for wrong in ("", TOKEN, key[:-1], key + "x", "ß"):
            status, answer = post(f"{url}/v1/chat/completions", wrong.encode().decode("latin1"), asked)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        for wrong in ("", key, TOKEN[:-1]):
            assert post(f"{url}/sessions/next", wrong)[0] == 401
        assert post(f"{url}/v1/chat/completions", key, asked)[0] == 200
        assert post(f"{url}/sessions/reward", key, {"reward": 1})[0] == 200
        assert post(f"{url}/v1/chat/completions", key, asked)[0] == 401
        running.join(30)


def test_strangers_hold_no_program_up_and_fill_no_log(token_file, capfd):
    with pulled(token_file) as (ours, url):
        running = in_background(ours, Task("q"))
        key = post(f"{url}/sessions/next", TOKEN)[1]["api_key"]
        gateway = process_below(os.getpid(), "gateway_process")

        def ask() -> None:
            hello = {"messages": [{"role": "user", "content": "hello"}]}
            assert post(f"{url}/v1/chat/completions", key, hello)[0] == 200

        crowd(ours.gateway.port, gateway.pid, ask)
        assert post(f"{url}/sessions/reward", key, {"reward": 1})[0] == 200
        running.join(30)
    assert len(capfd.readouterr().err) < 1000


WRONG = [
    (400, b"", "cannot be read as JSON"),
    (400, b"[]", "must be a JSON object"),
    (400, b"\xff", "not UTF-8"),
    (400, b"[" * 9000, "cannot be read as JSON"),
    (400, b'{"messages": ' + b"[" * 70 + b"]" * 70 + b"}", "nested more than"),
    (400, b'{"messages": "\\ud800"}', "half of a surrogate pair"),
    (400, b'{"temperature": 1e999}', "not finite"),
    (413, b" " * 70_000, "may have 65536 bytes"),
]


def test_refusals_are_errors_of_the_api(token_file):
    config = GatewayConfig(token=TokenConfig(token_file=token_file), max_request_bytes=65536, calls_per_program=1)
    with Trainer(READER, config) as ours:
        url = ours.gateway.url
        ours.start(Task("q"))
        key = post(f"{url.removesuffix('/v1')}/sessions/next", TOKEN)[1]["api_key"]
        for status, body, sentence in WRONG:
            found = post(f"{url}/chat/completions", key, raw=body)
            assert found[0] == status and sentence in found[1]["error"]["message"], found
        for method, path, status in (("GET", "/chat/completions", 405), ("POST", "/models", 405), ("POST", "/x", 404)):
            request = urllib.request.Request(url + path, method=method, headers={"Authorization": f"Bearer {key}"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            assert refused.value.code == status and "message" in json.load(refused.value)["error"]
        asked = {"messages": [{"role": "user", "content": "hello"}]}
        waits = threading.Thread(target=post, args=(f"{url}/chat/completions", key, asked))
        waits.start()
        assert isinstance(ours.events.get(timeout=30), Called)
        status, answer = post(f"{url}/chat/completions", key, asked)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    waits.join(30)
    assert not waits.is_alive()


def test_the_network_needs_a_token(token_file, monkeypatch):
    monkeypatch.setenv("NO_SUCH_TOKEN", "")
    monkeypatch.delenv("NO_SUCH_TOKEN")
    settings = {"offer": OFFER, "attempts": 1, "episode_timeout_s": 1.0}
    open_to_all = GatewayConfig(listen="0.0.0.0:0", token=TokenConfig(token_env="NO_SUCH_TOKEN"))
    with pytest.raises(UserError, match=r"agent.listen=0.0.0.0:0 would open the policy to the network without a token"):
        Gateway(open_to_all, lambda event: None, **settings)
    gateway = Gateway(replace(open_to_all, token=TokenConfig(token_file=token_file)), lambda event: None, **settings)
    try:
        assert gateway.url.startswith("http://127.0.0.1:")
        assert until(lambda: post(f"{gateway.url}/chat/completions", TOKEN)[0] == 401)
    finally:
        gateway.close()
