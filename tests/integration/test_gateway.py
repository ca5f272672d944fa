"""Programs that know an OpenAI endpoint and nothing of training get the policy's answers, and their tokens can be trained."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nemo_style_rlhf.agents import gateway_process
from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.events import Called, Ended, Failed
from nemo_style_rlhf.agents.gateway import Gateway
from nemo_style_rlhf.schema.gateway import GatewayConfig
from tests.support.agents import OFFER, Trainer, program, until
from tests.support.paths import ROOT
from tests.support.processes import is_alive, process_below
from tests.unit.agents.chat_templates import CHATML, MISTRAL, encoder

READER = encoder(CHATML)
TOKEN = "the-token-of-the-run"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def trainer(command: list[str], reader=READER, *, programs: int = 16, **settings) -> Trainer:
    return Trainer(reader, GatewayConfig(command=command, programs=programs), **settings)


@pytest.fixture
def written(tmp_path: Path):
    """Writes a program, and returns its command."""
    return lambda text: program(tmp_path / "my_agent.py", text, python=sys.executable)


def learned(trainer: Trainer, episode: int) -> list[str]:
    """Of each row of an episode, the text that it trains."""
    rows = trainer.rows(episode)
    pairs = [zip(row.tokens, row.mask, strict=True) for row in rows]
    return [str(READER.tokenizer.decode([token for token, trained in row if trained])) for row in pairs]


# --- programs that the gateway starts ---------------------------------------------------------------------------------

CONVERSATION = """
answer = ask(user(TASK["prompt"]))
again = ask(user(TASK["prompt"]), assistant(answer), user(TASK["label"]), max_tokens=20)
print("thinking...")
print(json.dumps({"reward": len(again), "score": 0.5, "metrics": {"attempt": TASK["attempt"], "seed": TASK["seed"]}}))
"""


def test_a_program_reads_its_task_and_gives_its_reward(written):
    with trainer(written(CONVERSATION)) as ours:
        ours.run(*[Task(f"q{number}", label="more", row={"n": number}, seed=number) for number in range(8)])
        for episode in range(8):
            last = ours.ended[episode].observation
            (row,) = ours.rows(episode)
            assert len(row.turns) == 2 and last.done and last.score == 0.5
            assert last.metrics == {"attempt": 1.0, "seed": float(episode)}
            assert row.tokens[: row.turns[0].start] == tuple(
                READER.rendered(READER.chat([{"role": "user", "content": f"q{episode}"}], add_generation_prompt=True))
            )
            (second,) = (
                event for event in ours.seen if isinstance(event, Called) and event.episode == episode and event.call
            )
            assert second.sampling == {"max_length": 20}
        assert not ours.failed


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("", 0.0),
        ("print(' 3 ')", 3.0),
        ("print('x'); print(-1.5); print()", -1.5),
        ("print(json.dumps({'reward': 2}))", 2.0),
        ("print('{}')", 0.0),
        ("print('y' * 3_000_000); sys.stderr.write('z' * 3_000_000); print(7)", 7.0),
    ],
)
def test_rewards_of_programs(written, text, reward):
    with trainer(written(text)) as ours:
        assert ours.run(Task("q")).ended[0].observation.reward == reward
        assert ours.rows(0) == []


def test_a_program_names_the_answer_that_is_scored(written):
    """By the id of its completion, of any of its calls."""
    command = written(
        "ids = [post('/chat/completions', messages=[user(word)])['id'] for word in ('a', 'b', 'c')]\n"
        "ids.append(post('/completions', prompt='d')['id'])\n"
        "print(json.dumps({'reward': 1, 'answer': ids[int(TASK['prompt'])]}))"
    )
    with trainer(command) as ours:
        ours.run(*(Task(str(number)) for number in range(4)))
        for episode in range(4):
            assert ours.ended[episode].answer == episode
            named = ours.sessions[episode, 1].rows(episode)[-1]
            assert READER.rendered("abcd"[episode])[0] in named.tokens


FAILURES = {
    "exit": ("sys.exit(3)", "the program ended with exit code 3"),
    "exception": ("raise RuntimeError('no luck')", "exit code 1: RuntimeError: no luck"),
    "signal": ("os.kill(os.getpid(), 9)", "the program ended with signal 9"),
    "no JSON": ("print('done')", "its last line 'done' is no reward"),
    "NaN": ("print('NaN')", "its last line 'NaN' is no reward"),
    "truth": ("print('true')", "its last line 'true' is no reward"),
    "huge": ("print('1' + '0' * 400)", "is no reward"),
    "surplus": ("print(json.dumps({'reward': 1, 'rewards': 2}))", "expected a JSON number, or an object with"),
    "text": ("print(json.dumps({'reward': 'a'}))", "expected finite numbers"),
    "metrics": ("print(json.dumps({'metrics': {'a': None}}))", "expected an object of finite numbers"),
    "answer": ("print(json.dumps({'answer': 'chatcmpl-0'}))", "its answer 'chatcmpl-0' is the id of none of"),
    "no name": ("print(json.dumps({'answer': 3}))", "expected the id of a completion for answer"),
}


def test_a_failed_attempt_is_one_of_its_episode_alone(written):
    """Each episode that fails does so with its own sentence, twice; the others among them end well."""
    parts = "".join(f"if TASK['prompt'] == {name!r}:\n    {text}\n" for name, (text, _) in FAILURES.items())
    command = written(parts + "if TASK['prompt'] == 'well':\n    print(len(ask(user('hello'))) > 0 and 1)\n")
    tasks = [Task(prompt) for prompt in ("well", *FAILURES, "well")]
    with trainer(command, programs=4, attempts=2) as ours:
        ours.run(*tasks)
        for episode, task in enumerate(tasks):
            if task.prompt == "well":
                assert ours.ended[episode].observation.reward == 1.0 and episode not in ours.failed
                continue
            failures = ours.failed[episode]
            assert [(each.attempt, each.last, each.timed_out) for each in failures] == [
                (1, False, False), (2, True, False),
            ]  # fmt: skip
            assert all(FAILURES[task.prompt][1] in each.reason for each in failures), failures
            assert episode not in ours.ended


def test_a_later_attempt_may_end_well_and_samples_the_same(written):
    command = written("text = ask(user('hello'))\nif TASK['attempt'] < 3:\n    sys.exit(1)\nprint(1)")
    with trainer(command) as ours:
        ours.run(Task("q", seed=4))
        assert ours.ended[0].attempt == 3 and [each.last for each in ours.failed[0]] == [False, False]
        rows = [ours.sessions[0, attempt].rows() for attempt in (1, 2, 3)]
        assert rows[0] == rows[1] == rows[2] and len(rows[0]) == 1


def test_a_program_that_hangs_is_ended(written):
    command = written("if TASK['prompt'] == 'hang':\n    ask(user('a'))\n    import time; time.sleep(600)\nprint(1)")
    with trainer(command, attempts=2, episode_timeout_s=2.0) as ours:
        ours.run(Task("hang"), Task("well"))
        assert [(each.timed_out, each.last) for each in ours.failed[0]] == [(True, False), (True, True)]
        assert "agent.episode_timeout_s=2" in ours.failed[0][0].reason
        assert ours.ended[1].observation.reward == 1.0


def test_a_slow_policy_ends_no_program(written):
    def policy(call: Called, ids, seed) -> Action:
        time.sleep(2.5)
        return ours.sample(call, ids, seed)

    with trainer(written("ask(user('a'))\nprint(1)"), attempts=1, episode_timeout_s=2.0, policy=policy) as ours:
        ours.run(Task("q"))
        assert ours.ended[0].observation.reward == 1.0 and ours.ended[0].seconds < 2.0


def test_a_program_that_cannot_be_started_is_a_sentence():
    with trainer(["/no/such/program"], attempts=2) as ours:
        ours.run(Task("q"))
        assert "cannot be started" in ours.failed[0][1].reason and ours.failed[0][1].last


@pytest.mark.parametrize("end", ["", "print(5)", "sys.exit(1)"])
def test_an_episode_at_its_limit_ends_as_its_program_likes(written, end):
    """A program may ask on and on; an exit because of the refusal is no failure."""
    text = """
import urllib.error
answers = []
while len(answers) < 9:
    try:
        answers.append(ask(*[user(str(len(answers)))]))
    except urllib.error.HTTPError as error:
        assert error.code == 400 and json.load(error)["error"]["code"] == "context_length_exceeded"
        answers += [None] * 9
"""
    with trainer(written(text + end), most_calls=3) as ours:
        ours.run(Task("q"))
        assert ours.ended[0].observation.reward == (5.0 if "5" in end else 0.0)
        assert len(ours.rows(0)) == 3 and not ours.failed


def test_what_the_template_cannot_render_is_an_error_of_the_call_alone(written):
    text = """
import urllib.error
try:
    ask(user("one"), user("two"))
except urllib.error.HTTPError as error:
    print(ask(user("one")) and "the chat template cannot render" in json.load(error)["error"]["message"] and error.code)
"""
    reader = encoder(MISTRAL + "<|im_end|>")
    with trainer(written(text), reader) as ours:
        assert ours.run(Task("q")).ended[0].observation.reward == 400.0


# --- the order of calls changes nothing -------------------------------------------------------------------------------

CONCURRENT = """
import threading
def thread(number):
    messages = [user(TASK["prompt"] + str(number % 3))]
    for turn in range(3):
        answer = ask(*messages, **({"max_tokens": 9} if number == 5 else {}))
        messages += [assistant(answer), user(f"and {answer}?")]
threads = [threading.Thread(target=thread, args=(number,)) for number in range(6)]
for each in threads: each.start()
for each in threads: each.join()
print(1)
"""


def test_calls_side_by_side_have_the_same_tokens_in_any_order(written):
    command, tasks = written(CONCURRENT), [Task(f"q{number} ", seed=number % 2) for number in range(3)]
    found = []
    for order in (None, random.Random(1), random.Random(2)):
        with trainer(command, order=order) as ours:
            ours.run(*tasks)
            found.append([ours.rows(episode) for episode in range(3)])
    assert found[0] == found[1] == found[2]
    assert [len(rows) for rows in found[0]] == [6, 6, 6]
    assert all(sum(len(row.turns) for row in rows) == 18 for rows in found[0])


# --- the unmodified client of OpenAI ----------------------------------------------------------------------------------

OPENAI_PROGRAM = """
import json, sys
from openai import BadRequestError, OpenAI

client, task = OpenAI(), json.load(sys.stdin)
messages = [{"role": "user", "content": task["prompt"]}]
tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
first = client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools)
assert first.choices[0].finish_reason == "tool_calls" and first.model == "gpt-4o"
(call,) = first.choices[0].message.tool_calls
assert json.loads(call.function.arguments) == {"word": "cat"}
messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "an animal"}]
second = client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools, logprobs=True, temperature=1.0)
logprobs = second.choices[0].logprobs.content
assert len(logprobs) == second.usage.completion_tokens and all(each.logprob < 0 for each in logprobs)
assert second.usage.total_tokens == second.usage.prompt_tokens + len(logprobs) > len(logprobs)
messages += [{"role": "assistant", "content": second.choices[0].message.content}, {"role": "user", "content": "And now?"}]
parts, usage = [], None
for chunk in client.chat.completions.create(
    model="gpt-4o", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
):
    usage = chunk.usage or usage
    parts += [choice.delta.content or "" for choice in chunk.choices]
assert usage.completion_tokens and "".join(parts)
text = client.completions.create(model="gpt-4o", prompt="Once upon", max_tokens=5)
assert text.choices[0].text and text.usage.completion_tokens
streamed = [each.choices[0].text for each in client.completions.create(model="gpt-4o", prompt=[5, 6, 7], stream=True)]
assert "".join(streamed)
assert [each.id for each in client.models.list()] == ["policy"]
try:
    client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.2)
except BadRequestError as error:
    assert error.param == "temperature" and error.code == "unsupported_value", error
    print(json.dumps({"reward": 1, "metrics": {"words": len("".join(parts).split())}}))
"""


def test_an_unmodified_openai_program_is_trained(tmp_path):
    """With tools, log-probabilities, streams, texts and token ids; all calls of its conversation are one row."""
    (tmp_path / "my_agent.py").write_text(OPENAI_PROGRAM)

    def policy(call: Called, ids, seed) -> Action:
        action = ours.sample(call, ids, seed)
        if call.tools and call.call == 0:
            function = {"name": "look_up", "arguments": {"word": "cat"}}
            return replace(
                action, text="", message={"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
            )
        return action

    with trainer([sys.executable, str(tmp_path / "my_agent.py")], policy=policy) as ours:
        ours.run(Task("What is a cat?"))
        assert ours.ended[0].observation.reward == 1.0, ours.failed
        lengths = sorted(len(row.turns) for row in ours.rows(0))
        assert lengths == [1, 1, 3]
        calls = [event for event in ours.seen if isinstance(event, Called)]
        assert calls[0].tools == [TOOL] and calls[3].prompt == "Once upon" and calls[4].prompt == [5, 6, 7]
        assert calls[3].sampling == {"max_length": 5}


# --- ends -------------------------------------------------------------------------------------------------------------

FAMILY = """
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(TASK["row"]["folder"] + f"/{TASK['seed']}.{TASK['attempt']}", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
ask(user("hello"))
if TASK["prompt"] == "stay":
    time.sleep(600)
print(1)
"""
OWNER = """
import queue, sys
from nemo_style_rlhf.agents.api_requests import Offer
from nemo_style_rlhf.agents.environment import Action, Task
from nemo_style_rlhf.agents.gateway import Gateway
from nemo_style_rlhf.schema.gateway import GatewayConfig

events = queue.Queue()
gateway = Gateway(GatewayConfig(command=sys.argv[2:]), events.put, offer=Offer(), attempts=1, episode_timeout_s=600.0)
for number in range(3):
    gateway.start(number, Task("stay", row={"folder": sys.argv[1]}, seed=number))
while True:
    gateway.answer(events.get(), Action("a", {"role": "assistant", "content": "a"}, (1,), (-1.0,)))
"""


def pids(folder: Path) -> set[int]:
    """Every process that a program of FAMILY has written down."""
    return {int(pid) for path in folder.iterdir() for pid in path.read_text().split()}


def alive(numbers: set[int]) -> set[int]:
    return set(filter(is_alive, numbers))


def test_no_program_outlives_its_episode(written, tmp_path):
    """Neither one that ended well and left a child behind, nor those of a source that forgets its episodes, or that closes."""
    folder = tmp_path / "pids"
    folder.mkdir()
    command = written(FAMILY)
    with trainer(command) as ours:
        ours.run(*[Task("go", row={"folder": str(folder)}, seed=number) for number in range(3)])
        assert len(pids(folder)) == 6 and until(lambda: not alive(pids(folder)))
        ours.start(*[Task("stay", row={"folder": str(folder)}, seed=number) for number in (3, 4)])
        while len(ours.sessions) < 5:
            ours.serve_once()
        assert len(alive(pids(folder))) == 4
        ours.gateway.forget()
        assert until(lambda: not alive(pids(folder)))
        ours.start(Task("stay", row={"folder": str(folder)}, seed=5))
        while len(ours.sessions) < 6:
            ours.serve_once()
        assert len(alive(pids(folder))) == 2
    assert not alive(pids(folder))


@pytest.mark.parametrize("whom", ["the trainer", "the gateway and its trainer"])
def test_programs_end_with_a_trainer_that_is_killed(written, tmp_path, whom):
    folder = tmp_path / "pids"
    folder.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder), *written(FAMILY)], cwd=ROOT)
    try:
        assert until(
            lambda: len(list(folder.iterdir())) == 3 and all(path.read_text() for path in folder.iterdir()), 60
        )
        below = psutil.Process(owner.pid).children(recursive=True)
        assert len(below) == 11  # the gateway, three programs, their supervisors and their children
        if whom != "the trainer":
            gateway = process_below(owner.pid, "gateway_process")
            gateway.suspend()  # or it would see its trainer end
            owner.kill()
            gateway.kill()
        owner.kill()
        owner.wait()
        assert until(lambda: not alive({each.pid for each in below} | pids(folder)))
    finally:
        owner.kill()
        owner.wait()


def test_a_gateway_that_is_killed_begins_its_episodes_again(written, tmp_path):
    """At no charge, with the same samples."""
    folder = tmp_path / "pids"
    folder.mkdir()
    command = written(FAMILY.replace('TASK["prompt"] == "stay"', 'TASK["attempt"] == 1'))
    with trainer(command, attempts=1) as ours:
        url = ours.gateway.url
        ours.start(*[Task("q", row={"folder": str(folder)}, seed=number) for number in range(3)])
        while len(ours.sessions) < 3:
            ours.serve_once()
        process = process_below(os.getpid(), "gateway_process")
        process.kill()
        while ours.left:
            ours.serve_once()
        assert [(each.attempt, each.last, each.charged) for each in ours.failed[0]] == [(1, False, False)]
        assert "the gateway's process ended with exit code -9" in ours.failed[0][0].reason
        for episode in range(3):
            assert isinstance(ours.ended[episode], Ended) and ours.ended[episode].attempt == 2
            assert ours.rows(episode) == ours.sessions[episode, 1].rows()
        assert ours.gateway.url == url
    assert until(lambda: not alive(pids(folder)))


def test_a_gateway_that_always_dies_fails_its_episodes(written, monkeypatch):
    monkeypatch.setattr(gateway_process, "__name__", "no_such_module")
    events = []
    gateway = Gateway(GatewayConfig(command=["true"]), events.append, offer=OFFER, attempts=1, episode_timeout_s=1.0)
    try:
        gateway.start(0, Task("q"))
        assert until(lambda: any(isinstance(event, Failed) and event.last for event in events))
        assert "the gateway's process died 6 times, last with exit code 1" in events[-1].reason
        gateway.start(1, Task("q"))
        assert events[-1].episode == 1 and events[-1].last
    finally:
        gateway.close()


def test_no_event_comes_after_forget(written):
    with trainer(written("ask(user('hello'))\nprint(1)")) as ours:
        ours.start(*[Task("q", seed=number) for number in range(4)])
        ours.serve_once()
        ours.gateway.forget()
        seen = ours.events.qsize()
        late = [event for event in ours.seen if isinstance(event, Called)]
        for event in late:
            ours.gateway.answer(event, ours.sample(event, [1], 1))
        ours.gateway.start(9, Task("q"))
        while not isinstance(event := ours.events.get(timeout=60), Called) or event.episode != 9:
            seen -= 1
        assert seen == 0


def test_signals_of_the_terminal_are_the_trainers(written):
    """Ctrl-C reaches the whole process group; the trainer decides what becomes of its episodes."""
    with trainer(written("ask(user('hello'))\nprint(1)")) as ours:
        ours.run(Task("q"))
        process = process_below(os.getpid(), "gateway_process")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, number)
        time.sleep(0.2)
        ours.run(Task("q"))
        assert len(ours.ended) == 2 and not ours.failed
