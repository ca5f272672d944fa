"""Every preset of conf/algorithm/ in a real actor process, rewarded by a function; the critic-free ones without a server."""

import json
import math
import random
from pathlib import Path

import pytest

from tests.support import operators
from tests.support.metrics import metrics, samples
from tests.support.models import WORDS, save_run_inputs
from tests.support.processes import Process, start_actor, start_server, wait_for_output

STEPS = 3
REWARD = """
def reward_func(queries, prompts, labels):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    rewards = [len(set(query[len(prompt):].split())) / 12 for query, prompt in zip(queries, prompts)]
    return {"rewards": rewards, "extra_logs": {"label": [float(label) for label in labels]}}
"""
COMMON = [
    "model=fp32", "run.num_threads=1", "engine.optim.lr=2e-3", "data.label_key=label", "reward=function",
    f"algorithm.max_steps={STEPS}", "algorithm.num_rollout_samples=32", "algorithm.mini_batches=2",
    "generation.max_length=12", "generation.kv_cache_gib=0.1",
    "generation.max_num_seqs=16", "generation.max_num_batched_tokens=16",  # vLLM splits prompts in every rollout
]  # fmt: skip
RUNS = {
    "reinforce_pp": ["correction=tis", "algorithm.kl_target=0.05"],
    "reinforce_pp_baseline": ["algorithm.shaping.normalize=running", "algorithm.shaping.overlong_buffer=4"],
    "grpo": ["correction=sequence_mask", "algorithm.filter.low=0.05", "algorithm.filter.high=0.99"],
    "dr_grpo": ["correction=icepop", "algorithm.ratio_eps_high=0.28", "algorithm.dual_clip=3"],
    "rloo": ["algorithm.old_logprobs=sampler", "algorithm.entropy_bonus=0.01"],
    "gspo": ["reward.function.per_sample=true", "data.sampling_key=sampling"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    rows = [
        {
            "prompt": " ".join(f"w{(2 + 7 * i + j) % 62}" for j in range(2 + 5 * (i % 5))),
            "label": str(i),
            "sampling": {"temperature": 0.7, "max_length": 6, "stop": ["w9"]} if i % 2 else {},
        }
        for i in range(30)
    ]
    return save_run_inputs(tmp_path_factory.mktemp("inputs"), REWARD, rows)


def start(inputs: Path, folder: Path, *overrides: str, port: int = 9, function: Path | None = None) -> Process:
    """An actor; without a server nothing listens on ``port``. Its operators are recorded."""
    return start_actor(
        folder, port, *COMMON, f"model.path={inputs / 'policy'}", f"data.train_path={inputs / 'rows.jsonl'}",
        f"reward.function.path={function or inputs / 'reward.py'}", *overrides,
        environment={operators.VARIABLE: str(folder.with_suffix(".json"))},
    )  # fmt: skip


def run(inputs: Path, folder: Path, *overrides: str, **settings: object) -> list[dict[str, float]]:
    """The metrics of a run to its end."""
    actor = start(inputs, folder, *overrides, **settings)
    try:
        assert actor.wait(180) == 0, actor.output()
    finally:
        actor.kill()
    assert not operators.refused(folder.with_suffix(".json"))
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    return rows


@pytest.mark.parametrize("preset", RUNS)
def test_a_preset_trains_without_a_critic(preset, inputs, tmp_path):
    rows = run(inputs, tmp_path, f"algorithm={preset}", *RUNS[preset])
    for row in rows:
        assert row["train_rollouts/reward_failures"] == 0
        assert 0 <= row["train_rollouts/function/label"] < 30
        assert row["train_optim/grad_norm"] > 0
        assert (preset == "rloo") == ("train_rollouts/sampler_logprob_gap_max" not in row)
        assert row.get("train_rollouts/sampler_logprob_gap_max", 0) < 1e-3
        assert row["train_optim/ratio_error_first_mini_batch"] < 1e-3
        assert not any(name.startswith("critic/") for name in row)
        compared = preset != "reinforce_pp"  # which has one sample per prompt
        assert compared == ("train_rollouts/frac_reward_zero_std" in row)
        assert ("train_optim/empty_steps" in row) == (preset in ("reinforce_pp", "dr_grpo", "gspo"))
    if "correction" in " ".join(RUNS[preset]):
        assert rows[0]["train_rollouts/correction_weight"] == pytest.approx(1, abs=1e-3)
        assert rows[0]["train_rollouts/correction_ess"] == pytest.approx(1, abs=1e-3)
        assert rows[0]["train_rollouts/correction_masked_fraction"] == 0
    if preset == "grpo":
        assert rows[0]["train_rollouts/rounds"] >= 1
    if preset == "reinforce_pp":
        assert rows[1]["train_rollouts/kl_coef"] < rows[0]["train_rollouts/kl_coef"]  # KL is still below its target
    if preset == "gspo":
        sampled = samples(tmp_path, 1)
        own = [sample for sample in sampled if int(sample["label"]) % 2]
        assert own and all(sample["response_tokens"] <= 6 for sample in own)
        assert max(sample["response_tokens"] for sample in sampled) > 6
        assert {sample["finish_reason"] for sample in own} == {"stop", "length"}


def test_a_rollout_of_many_different_prompts_at_vllms_own_settings(inputs, tmp_path):
    """Far more prompt tokens than vLLM computes in a step (4,096), and no two prompts begin alike."""
    rng = random.Random(0)
    rows = [{"prompt": " ".join(rng.choices(WORDS[2:], k=37)), "label": str(i % 30)} for i in range(256)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [
        f"data.train_path={tmp_path / 'train'}.jsonl",
        "algorithm.num_rollout_samples=256",
        "algorithm.mini_batches=4",
    ]
    vllms = ["generation.max_num_seqs=256", "generation.max_num_batched_tokens=null"]
    metrics = run(inputs, tmp_path / "run", "algorithm=reinforce_pp", *own, *vllms)
    assert all(row["train_rollouts/distinct_fraction"] > 0.8 for row in metrics)


def test_the_critic_server_gives_values_to_ppo_and_rewards_to_every_algorithm(inputs, tmp_path):
    (tmp_path / "critic").mkdir()
    server, port = start_server(
        tmp_path / "critic", "model.dtype=float32", "run.num_threads=1", f"model.path={inputs / 'reward'}",
        environment={operators.VARIABLE: str(tmp_path / "critic.json")},
    )  # fmt: skip
    try:
        weights = ["reward.critic.weight=0.5", "reward.function.weight=2"]
        without_values = run(inputs, tmp_path / "rloo", "algorithm=rloo", *weights, port=port)
        rows = run(inputs, tmp_path / "actor", *weights, port=port)
    finally:
        assert server.terminate() == 0
    assert not operators.refused(tmp_path / "critic.json")
    for row in without_values:  # the server is asked for rewards only
        assert "train_rollouts/values" not in row and "critic/loss" not in row
    for row in rows:
        assert "train_rollouts/values" in row and row["critic/loss"] > 0
    for row in without_values + rows:
        parts = 0.5 * row["train_rollouts/critic/reward"] + 2 * row["train_rollouts/function/reward"]
        assert row["train_rollouts/rewards"] == pytest.approx(parts, abs=1e-5)


@pytest.mark.parametrize("on_error", ["stop", "mask"])
def test_a_reward_function_that_fails_stops_the_run_or_masks_its_samples(on_error, inputs, tmp_path):
    failing = tmp_path / "failing.py"
    failing.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    if int(labels[0]) % 3 == 0:\n"
        "        raise ValueError('no number here')\n"
        "    return [1.0]\n"
    )
    overrides = ["reward.function.per_sample=true", f"reward.on_error={on_error}", "algorithm=reinforce_pp"]
    if on_error == "mask":
        rows = run(inputs, tmp_path / "run", *overrides, function=failing)
        assert all(0 < row["train_rollouts/reward_failures"] < 32 for row in rows)
        assert all(row["train_rollouts/rewards"] == 1 for row in rows)
        return
    actor = start(inputs, tmp_path / "run", *overrides, function=failing)
    assert actor.wait(120) == 2
    (line,) = [line for line in actor.output().splitlines() if line.startswith("error: ")]
    assert "raised ValueError: no number here" in line and "reward.on_error=mask" in line


@pytest.mark.more
def test_a_validation_without_a_single_reward_is_not_the_best(inputs, tmp_path):
    """Every validation sample of step 0 fails; the ones after it do not."""
    rows = [json.dumps({"prompt": f"w{i} w{i + 1}", "label": "-1"}) + "\n" for i in range(4)]
    (tmp_path / "val.jsonl").write_text("".join(rows))
    recovering = tmp_path / "recovering.py"
    recovering.write_text(
        "from pathlib import Path\n"
        "TRAINS = Path(__file__).with_suffix('.trains')\n"
        "def reward_func(queries, prompts, labels):\n"
        "    if '-1' not in labels:\n"
        "        TRAINS.touch()\n"
        "    if not TRAINS.exists():\n"
        "        raise ValueError('not yet')\n"
        "    return [1.0] * len(queries)\n"
    )
    overrides = [
        "reward.on_error=mask", "algorithm=reinforce_pp", f"data.val_path={tmp_path / 'val.jsonl'}",
        "algorithm.val_check_interval=1", "checkpoint.keep_best=true",
    ]  # fmt: skip
    actor = start(inputs, tmp_path / "run", *overrides, function=recovering)
    assert actor.wait(180) == 0, actor.output()
    lines = metrics(tmp_path / "run")
    assert [line["val_rollouts/reward_failures"] for line in lines] == [4, 0, 0, 0]
    assert json.loads((tmp_path / "run" / "best" / "best.json").read_text()) == {"step": 1, "val_rollouts/rewards": 1.0}


ONE_WORD = """
def reward_func(queries, prompts, labels):
    return [query[len(prompt):].split().count("w7") for query, prompt in zip(queries, prompts)]
"""


@pytest.mark.more
def test_a_run_that_collapses_says_so_and_audit_on_sign_stops_it_wherever_it_resumes(inputs, tmp_path):
    """The reward counts one word and the learning rate is far too high. Nobody asked for a check."""
    (tmp_path / "one_word.py").write_text(ONE_WORD)
    collapse = [
        "algorithm=grpo", "generation=hf", "engine.optim.lr=1e-2", "algorithm.num_rollout_samples=48",
        "algorithm.initial_policy_kl_penalty=0.001", "algorithm.max_steps=14", "checkpoint.save_interval=1",
    ]  # fmt: skip
    settings = {"function": tmp_path / "one_word.py"}

    def start_one(folder: Path, *overrides: str) -> Process:
        return start(inputs, folder, *collapse, *overrides, **settings)

    def warnings(output: str, metric: str) -> list[str]:
        return [
            line for line in output.splitlines() if "WARNING step" in line and f": train_rollouts/{metric}=" in line
        ]

    warned = start_one(tmp_path / "warned")
    assert warned.wait(180) == 0, warned.output()
    rows = metrics(tmp_path / "warned")

    def bigrams(row: dict[str, float]) -> float:
        return 48 * (row["train_rollouts/response_lengths"] - 1)

    def halved(row: dict[str, float]) -> bool:
        """Half of the first step's, as long as the rollout is no longer than that one."""
        fewer = min(1, bigrams(rows[0]) / bigrams(row))
        return row["train_rollouts/distinct_2"] < rows[0]["train_rollouts/distinct_2"] / 2 * fewer

    runaway = [row["step"] for row in rows if row["train_rollouts/init_policy_kl"] > 1]
    fallen = [row["step"] for row in rows if halved(row)]
    for metric, steps in (("init_policy_kl", runaway), ("distinct_2", fallen)):
        assert len(steps) > 3, rows
        first, *later = warnings(warned.output(), metric)
        assert f"WARNING step {steps[0]}: " in first and f"look at the samples of step {steps[0]} " in first
        assert len(later) == len([step for step in steps if step == steps[0] + 10])
    assert "w7 w7 w7 w7" in warned.output().split("Samples of this step:")[-1]

    sentences = []
    for folder, moment in (("stopped", None), ("killed", "GRPO 2/14")):
        overrides = ["audit.on_unhealthy=stop", "audit.health.runaway_kl=null"]
        actor = start_one(tmp_path / folder, *overrides)
        if moment:  # the rollout that distinct_2 is compared with is one that the next process never sees
            wait_for_output(actor, moment)
            actor.kill()
            actor = start_one(tmp_path / folder, *overrides)
        assert actor.wait(180) == 2, actor.output()
        assert ("resumed from step" in actor.output()) == bool(moment) and "from step 0" not in actor.output()
        sentences += [line for line in actor.output().splitlines() if line.startswith("error: ")]
        ended = [row["step"] for row in metrics(tmp_path / folder)]
        assert ended[-1] == fallen[0]
    assert "distinct_2=" in sentences[0] and "; the run stops" in sentences[0]
    assert sentences[0] == sentences[1] and len(sentences) == 2


SOLVED = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):].split() for query, prompt in zip(queries, prompts)]
    return [1.0 if int(label) >= 8 else len(set(answer)) / 24 for answer, label in zip(answers, labels)]
"""
"""All prompts but the first eight are solved by any answer."""


AHEAD = ["generation.engines.count=1", "algorithm.staleness=1", "correction=tis"]


@pytest.mark.parametrize("ahead", [[], pytest.param(AHEAD, marks=pytest.mark.more)], ids=["", "ahead"])
def test_a_run_whose_prompts_are_all_solved_ends_well_and_the_same_command_ends_at_once(ahead, inputs, tmp_path):
    """After two steps of eight prompts. With a lost export, too: the run goes on from its checkpoint, and ends there again."""
    (tmp_path / "solved.py").write_text(SOLVED)
    settings = [
        "algorithm=grpo", "algorithm.max_steps=50", "algorithm.filter.high=1", "algorithm.num_rollout_samples=16",
        "algorithm.samples_per_prompt=4", "data.shuffle=false", "generation=hf", "checkpoint.save_interval=20",
        "algorithm.filter.max_rounds=2", *ahead,
    ]  # fmt: skip
    folder = tmp_path / "run"
    why = "all 8 prompts of 2 rollouts reach algorithm.filter.high=1"

    def started() -> str:
        actor = start(inputs, folder, *settings, function=tmp_path / "solved.py")
        try:
            assert actor.wait(180) == 0, actor.output()
        finally:
            actor.kill()
        return actor.output()

    def left() -> dict[str, bytes]:
        names = ("done.json", "export/model.safetensors", "checkpoints/step_000002/manifest.json")
        return {name: (folder / name).read_bytes() for name in names}

    assert f"{why}: the run ends after step 2 of 50" in started()
    ended, rows = left(), metrics(folder)
    assert json.loads(ended["done.json"])["why"] == why and [row["step"] for row in rows] == [1, 2]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], why in event["sentence"]) for event in events if event["kind"] == "over"] == [(2, True)]

    assert f"done: this run has ended ({why}) and exported {folder / 'export'}" in started()
    assert left() == ended and metrics(folder) == rows

    (folder / "export" / "model.safetensors").unlink()
    assert "resumed from step 2" in (said := started()) and f"{why}: the run ends after step 2 of 50" in said
    assert left() == ended and metrics(folder) == rows
