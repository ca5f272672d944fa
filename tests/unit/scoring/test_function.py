"""Reward functions in worker processes, and every way they go wrong."""

import functools
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.reward import FunctionRewardConfig
from nemo_style_rlhf.scoring.contract import arguments, requested
from nemo_style_rlhf.scoring.function import FunctionScorer
from nemo_style_rlhf.scoring.interface import Message, RewardError, ScoringSample
from tests.support.paths import ROOT
from tests.unit.scoring.sources import TENSORS, WAIT_S, alive, all_failed, masked, result, samples, stopped, wait_until

pytestmark = pytest.mark.slow("each starts workers")


def test_a_function_is_given_queries_prompts_and_labels():
    group = [*samples("a"), ScoringSample.of_texts(torch.tensor([1]), "p", "r")]
    assert arguments(group) == {
        "queries": ["prompt 0 response 0", "pr"],
        "prompts": ["prompt 0 ", "p"],
        "labels": ["a", None],
    }


def test_a_function_may_ask_for_responses_and_for_fields_of_the_rows():
    group = [
        ScoringSample.of_texts(torch.tensor([1]), "p ", "r", metadata={"level": 3, "labels": "the row's"}),
        ScoringSample.of_texts(torch.tensor([1]), "q ", "s", "label", {"tags": ["x"]}),
    ]
    assert arguments(group, ["completions", "level", "tags", "labels"]) == {
        "completions": ["r", "s"],
        "level": [3, None],
        "tags": [None, ["x"]],
        "labels": [None, "label"],
    }


def test_a_function_may_ask_for_the_turns_of_episodes():
    said = [Message("prompt", "p"), Message("response", "a"), Message("environment", "b"), Message("response", "c")]
    group = [ScoringSample(torch.tensor([1]), None, lambda: said), *samples("x")]
    assert arguments(group, ["turns"]) == {
        "turns": [
            [
                {"role": "response", "content": "a"},
                {"role": "environment", "content": "b"},
                {"role": "response", "content": "c"},
            ],
            [{"role": "response", "content": "response 0"}],
        ]
    }


def trl(prompts, completions, level, /, **kwargs): ...
def plain(queries, prompts, labels): ...
def by_name(completions, *, tags, unknown=1, level=None): ...
def everything(*args, **kwargs): ...
def wrong(queries, answers, solution): ...


@pytest.mark.parametrize(
    "function, names",
    [
        (plain, ["queries", "prompts", "labels"]),
        (by_name, ["completions", "tags", "level"]),
        (everything, ["queries", "prompts", "completions", "labels", "turns", "level", "tags"]),
        (functools.partial(by_name, tags=[]), ["completions", "tags", "level"]),
        (functools.wraps(by_name)(lambda *args, **kwargs: by_name(*args, **kwargs)), ["completions", "tags", "level"]),
        (dict, ["queries", "prompts", "labels"]),  # it tells no signature
    ],
)
def test_its_signature_tells_what_it_is_given(function, names):
    assert requested(function, {"tags", "level", "labels"}, "it") == names


@pytest.mark.parametrize(
    "function, said",
    [
        (
            wrong,
            "it asks for answers, solution, which no row has: it may ask for queries, prompts, completions, labels, turns, "
            "level;",
        ),
        (trl, "it takes prompts by position, but arguments are given by name: remove the / after it"),
    ],
)
def test_what_no_row_has_is_refused_at_once(function, said):
    with pytest.raises(UserError) as caught:
        requested(function, {"level"}, "it")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_fields_reach_the_function_in_its_process(tmp_path):
    path = tmp_path / "fields.py"
    path.write_text(
        "async def reward_func(level, **rest):\n    return [n * len(t) for n, t in zip(level, rest['completions'])]\n"
    )
    scorer = FunctionScorer(FunctionRewardConfig(path=str(path), weight=1.0, processes=1), {"level"})
    group = [ScoringSample.of_texts(torch.tensor([1]), "p", "abc", metadata={"level": n}) for n in (2, 0.5)]
    try:
        assert result(scorer.score(group)).rewards.tolist() == [6.0, 1.5]
    finally:
        scorer.close()


@pytest.mark.parametrize("kind", ["list", "numpy", "numbers", "column"])
@pytest.mark.parametrize("scorer", ["group", "async"])
def test_numbers_of_any_kind_are_rewards(functions, scorer, kind):
    scores = result(functions[scorer].score(samples(kind, "x", "x")))
    assert torch.equal(scores.rewards, torch.tensor([0.0, 1.0, 2.0]))
    assert scores.rewards.dtype == torch.float32
    assert not scores.failures.any()


def test_tensors_are_rewards(tmp_path):
    path = tmp_path / "tensors.py"
    path.write_text(TENSORS)
    scorer = FunctionScorer(FunctionRewardConfig(path=str(path), weight=1.0, processes=1))
    try:
        for kind in ("torch", "tensors"):
            assert result(scorer.score(samples(kind, "x", "x"))).rewards.tolist() == [0.0, 1.0, 2.0]
    finally:
        scorer.close()


def test_samples_are_freed_with_their_scores(functions):
    """Without the collector of cycles: they hold the texts of a rollout."""
    gc.collect()
    gc.disable()
    try:
        group = samples("list", "x")
        seen, scores = weakref.ref(group[0]), functions["group"].score(group)
        result(scores)
        del group
        wait_until(lambda: seen() is None)
        assert seen() is None
    finally:
        gc.enable()


def test_booleans_are_rewards(functions):
    assert result(functions["group"].score(samples("booleans", "x"))).rewards.tolist() == [0.0, 1.0]


def test_a_dict_has_scores_and_more_metrics(functions):
    scores = result(functions["group"].score(samples("dict", "x", "x")))
    assert scores.rewards.tolist() == [1.0, 1.0, 1.0]
    assert scores.filter_scores.tolist() == [0.0, 1.0, 2.0]
    assert scores.extra["length"].tolist() == [0.0, 1.0, 2.0]


def test_one_number_among_the_extra_logs_is_every_samples(functions):
    scores = result(functions["group"].score(samples("extra_one", "x", "x")))
    assert scores.extra["mean"].tolist() == [0.5] * 3 and scores.extra["any"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "kind, said",
    [
        ("raise", r"raised IndexError: list index out of range \(line \d+\): correct it"),
        ("mine", r"raised Mine: one and two \(line \d+\): correct it"),
        ("timeout", r"raised TimeoutError: the judge was slow \(line \d+\): correct it"),
        ("exit", r"raised SystemExit: 0 \(line \d+\): correct it"),
        ("die", "ended its process with exit code -9"),
        ("nan", "answered with nan as number 1 of rewards, expected finite numbers: correct what it returns"),
        ("short", "answered with 2 rewards, expected 3 numbers, one for each query: correct what it returns"),
        ("scalar", "answered with 1 rewards, expected 3 numbers"),
        ("string", "answered with rewards='0.5', expected 3 numbers"),
        ("words", r"answered with rewards=\['good', 'good', 'good'\], expected 3 numbers"),
        ("none", "answered with rewards=None, expected 3 numbers"),
        ("holes", r"answered with rewards=\[None, None, None\], expected 3 numbers"),
        ("odd", "answered with rewards=\"Odd\\(what='thing'\\)\", expected 3 numbers"),
        ("generator", "answered with rewards='<generator object"),
        ("huge", r"answered with rewards=\[10+\.\.\., expected 3 numbers"),
        ("no_rewards", r"answered with the keys \['scores'\], expected rewards among them: correct what it returns"),
        ("extra_list", r"answered with extra_logs=\[\], expected a dict of numbers"),
        (
            "extra_short",
            r"answered with 4 extra_logs\['length'\], expected 3 numbers, one for each query, or one for all: ",
        ),
    ],
)
def test_a_function_that_answers_wrongly_stops_the_run_or_is_masked(functions, rewards_file, caplog, kind, said):
    group = samples(kind, "x", "x")
    whole = rf"^the reward function reward_func of {rewards_file} {said}.*, or set reward.on_error=mask"
    assert (sentence := stopped(functions["group"], group)) and re.search(whole, sentence), sentence
    with caplog.at_level(logging.WARNING):
        assert all_failed(masked(functions["group"], group), 3)
    assert "3 of 3 samples have no reward: the reward function" in caplog.text
    assert result(functions["group"].score(samples("list"))).rewards.tolist() == [0.0]


def test_a_function_that_hangs_is_killed_and_the_next_call_works(functions):
    scorer = functions["group"]
    pid = int(result(scorer.score(samples("pid"))).rewards[0])
    assert alive(pid)
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"ran longer than 1 s and was killed: raise reward\.function\.timeout_s"):
        result(scorer.score(samples("stubborn", "x")))
    assert time.monotonic() - started < 60
    assert not alive(pid)
    assert int(result(scorer.score(samples("pid"))).rewards[0]) != pid


def test_per_sample_failures_concern_one_sample_each(functions):
    group = samples("list", "hang", "raise", "nan", "die", "list", "dict")
    scores = masked(functions["single"], group)
    assert scores.failures.tolist() == [False, True, True, True, True, False, False]
    assert scores.rewards.isnan().tolist() == scores.failures.tolist()
    assert scores.rewards[[0, 5, 6]].tolist() == [0.0, 0.0, 1.0]
    assert scores.extra["it/length"][6] == 0.0 and scores.extra["it/length"][:6].isnan().all()
    # Filtering looks at the reward of samples without a score of their own.
    assert scores.filter_scores[[0, 5, 6]].tolist() == [0.0, 0.0, 0.0]
    assert scores.filter_scores.isnan().tolist() == scores.failures.tolist()


def test_per_sample_failures_stop_the_run_with_the_first_reason(functions):
    assert "raised IndexError" in stopped(functions["single"], samples("list", "raise", "nan"))


def test_a_worker_that_dies_between_calls_is_replaced(rewards_file):
    scorer = FunctionScorer(FunctionRewardConfig(path=str(rewards_file), weight=1.0, timeout_s=5.0, processes=1))
    try:
        pid = int(result(scorer.score(samples("pid"))).rewards[0])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid))
        time.sleep(0.5)  # let the pool notice
        assert int(result(scorer.score(samples("pid"))).rewards[0]) != pid
    finally:
        scorer.close()


def test_importing_the_file_does_not_count_as_time_of_a_call(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\ntime.sleep(1.5)\ndef reward_func(queries, prompts, labels): return [1] * len(queries)\n"
    )
    scorer = FunctionScorer(FunctionRewardConfig(path=str(path), weight=1.0, timeout_s=0.5, processes=1))
    try:
        assert result(scorer.score(samples("x"))).rewards.tolist() == [1.0]
    finally:
        scorer.close()


def test_workers_end_with_a_killed_trainer(tmp_path):
    note, path = tmp_path / "pid", tmp_path / "endless.py"
    path.write_text(
        f"import os, pathlib\ndef reward_func(queries, prompts, labels):\n"
        f"    pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n    while True: pass\n"
    )
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        textwrap.dedent(f"""
        import torch
        from nemo_style_rlhf.schema.reward import FunctionRewardConfig
        from nemo_style_rlhf.scoring.function import FunctionScorer
        from nemo_style_rlhf.scoring.interface import ScoringSample
        if __name__ == "__main__":
            scorer = FunctionScorer(FunctionRewardConfig(path={str(path)!r}, weight=1.0, processes=1))
            scorer.score([ScoringSample.of_texts(torch.tensor([1]), "p", "r")]).result()
        """)
    )
    process = subprocess.Popen([sys.executable, str(trainer)])
    try:
        wait_until(lambda: note.exists() and note.read_text(), WAIT_S)
        assert alive(int(note.read_text()))
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not alive(int(note.read_text())))


@pytest.mark.parametrize(
    "source, name, said",
    [
        (None, "reward_func", r"there is no file .*rewards\.py: reward\.function\.path must name"),
        ("def other(): pass", "reward_func", r"rewards\.py has no function reward_func: set reward\.function\.name"),
        ("reward_func = 1", "reward_func", r"rewards\.py has no function reward_func: set reward\.function\.name"),
        ("def f(:\n  pass", "f", r"cannot be imported: SyntaxError: .* \(line 1\): correct .*rewards\.py"),
        ("\nimport no_such_thing", "f", r"ModuleNotFoundError: No module named 'no_such_thing' \(line 2\): correct"),
        ("raise SystemExit(3)", "f", r"cannot be imported: SystemExit: 3 \(line 1\): correct"),
    ],
)
def test_a_file_without_the_function_is_refused_at_once(tmp_path, source, name, said):
    path = tmp_path / "rewards.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(UserError, match=said) as caught:
        FunctionScorer(FunctionRewardConfig(path=str(path), name=name, weight=1.0))
    assert "\n" not in str(caught.value)


def test_a_file_may_have_any_name(tmp_path):
    path = tmp_path / "rewards"
    path.write_text("def reward_func(queries, prompts, labels): return [0.5]")
    scorer = FunctionScorer(FunctionRewardConfig(path=str(path), weight=1.0, processes=1))
    try:
        assert result(scorer.score(samples("x"))).rewards.tolist() == [0.5]
    finally:
        scorer.close()


CLOSE_EARLY = """
import os, sys, time
if __name__ != "__main__":
    time.sleep(0.2 * (os.getpid() % 12))  # workers, one after the other
else:
    import torch
    from nemo_style_rlhf.schema.reward import FunctionRewardConfig
    from nemo_style_rlhf.scoring.function import FunctionScorer
    from nemo_style_rlhf.scoring.interface import ScoringSample
    scorer = FunctionScorer(FunctionRewardConfig(path=sys.argv[1], weight=1.0, processes=12))
    print(scorer.score([ScoringSample.of_texts(torch.tensor([1]), "p", "r")]).result().rewards.tolist())
    scorer.close()
"""


def test_workers_that_still_start_say_nothing_when_they_are_closed(tmp_path):
    """The first answers while the last are on their way."""
    script, rewards = tmp_path / "close_early.py", tmp_path / "rewards.py"
    script.write_text(CLOSE_EARLY)
    rewards.write_text("def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n")
    done = subprocess.run([sys.executable, script, rewards], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[1.0]\n", done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_without_a_guard_is_refused_in_one_sentence(tmp_path):
    """Its worker processes would import it, and begin the run again."""
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n")
    work = (
        "from nemo_style_rlhf.schema.reward import FunctionRewardConfig\n"
        "from nemo_style_rlhf.scoring.function import FunctionScorer\n"
        "from nemo_style_rlhf.errors import UserError\n"
        "def work():\n"
        "    try:\n"
        "        FunctionScorer(FunctionRewardConfig(path='reward.py', weight=1.0)).close()\n"
        "        print('made')\n"
        "    except UserError as error:\n"
        "        print(error)\n"
    )
    said = []
    for start in ("work()\n", 'if __name__ == "__main__":\n    work()\n'):
        (tmp_path / "script.py").write_text(work + start)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        said.append(done.stdout)
    assert said[1] == "made\n"
    assert said[0].endswith('would begin its work again: put that work below `if __name__ == "__main__":`\n')
