"""Two real processes over real HTTP: what a run shows, and that killing it changes nothing."""

import json
import math
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nemo_style_rlhf.checkpoint.files import file_digests
from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.launch.preemption import PREEMPTED_EXIT
from tests.support import warm
from tests.support.metrics import metrics, samples, without_timers
from tests.support.ppo_runs import STEPS, actor_overrides, save_inputs, server_overrides
from tests.support.processes import Plug, Process, proxy, run_pair, start_actor, start_server, wait_for_output

FULL_DISK_BYTES = 2**18
"""A file may not grow beyond it; a model's does."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return save_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    """One run from start to end, nobody in its way."""
    folder = tmp_path_factory.mktemp("run")
    run_pair(folder, server_overrides(inputs), actor_overrides(inputs))
    return folder


def test_a_run_logs_every_step_with_the_documented_names(finished):
    rows = metrics(finished / "actor")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        assert all(math.isfinite(value) for value in row.values())
        assert {
            "train_rollouts/rewards", "train_rollouts/init_policy_kl", "train_rollouts/response_lengths",
            "train_rollouts/truncated_fraction", "train_rollouts/sampler_logprob_gap_max", "critic/loss",
            "critic/explained_variance", "timers/generate", "timers/step",
        } <= row.keys()  # fmt: skip
    for row in rows[2:]:
        assert {"train_optim/ppo_ratio", "train_optim/clip_fraction", "train_optim/approx_kl"} <= row.keys()
    assert [row["step"] for row in rows if "val_rollouts/rewards" in row] == [0, 3, 6]
    assert list((finished / "actor" / "tensorboard").glob("events.*"))


def test_nothing_has_moved_before_the_first_update(finished):
    rows = metrics(finished / "actor")
    assert abs(rows[1]["train_rollouts/init_policy_kl"]) < 1e-4
    assert abs(rows[2]["train_rollouts/init_policy_kl"]) < 1e-4  # step 1 warmed the critic up and left the policy alone
    assert "train_optim/ppo_ratio" not in rows[1]
    for row in rows[2:]:
        assert abs(row["train_optim/ppo_ratio_first_mini_batch"] - 1) < 1e-5
        assert row["train_optim/ratio_error_first_mini_batch"] < 1e-5
    assert rows[-1]["train_rollouts/init_policy_kl"] > 1e-4


def test_sampler_and_trainer_agree_at_every_step(finished):
    for row in metrics(finished / "actor")[1:]:
        assert row["train_rollouts/sampler_logprob_gap_max"] < 1e-3
        assert row["train_rollouts/transfer_probe_gap"] < 1e-3


def test_rollouts_can_be_read(finished):
    files = sorted((finished / "actor" / "rollouts").iterdir())
    assert [file.name for file in files] == [
        *(f"step_{step:06d}.parquet" for step in range(1, STEPS + 1)), "tokenizer.json"
    ]  # fmt: skip
    rows = samples(finished / "actor", 1)
    assert len(rows) == 48
    assert sum(row["reward"] for row in rows) / 48 == pytest.approx(
        metrics(finished / "actor")[1]["train_rollouts/rewards"]
    )
    tokenizer = AutoTokenizer.from_pretrained(finished / "actor" / "export")
    assert rows[0]["ratios"] is None  # only the critic learned in this step
    for row in samples(finished / "actor", STEPS)[:8]:
        assert tokenizer.decode(row["tokens"][row["prompt_tokens"] :]) == row["response"]
        assert len(row["values"]) == len(row["ratios"]) == row["response_tokens"] == sum(row["mask"])
        assert row["sampler_logprobs"] == pytest.approx(row["logprobs"], abs=1e-3)
        assert {*row["weights_versions"]} == {STEPS - 1} and row["ratio_max"] is not None


def test_checkpoints_name_both_halves_and_old_ones_are_gone(finished):
    folders = sorted((finished / "actor" / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step_000004", "step_000006"]
    manifest = json.loads((folders[-1] / "manifest.json").read_text())
    assert manifest["step"] == STEPS
    assert manifest["critic"]["critic_step"] == STEPS
    assert manifest["state"]["data_position"] == STEPS * 24
    assert manifest["files"]["actor/identity.json"]
    assert manifest["critic"]["files"]
    assert manifest["versions"]["torch"] == torch.__version__
    assert not any(name.startswith("hf/") for name in manifest["files"])


def test_every_checkpoint_holds_the_policy_as_an_export_does(finished):
    """Written while training went on: that of the last step is the export, file by file."""
    middle, last = (finished / "actor" / "checkpoints" / name / "hf" for name in ("step_000004", "step_000006"))
    export = finished / "actor" / "export"
    assert file_digests(last) == file_digests(export)
    assert file_digests(middle).keys() == file_digests(export).keys()
    assert (middle / "model.safetensors").read_bytes() != (export / "model.safetensors").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(middle).config.attention_dropout == 0.1


def test_the_export_is_a_plain_checkpoint_that_equals_the_sft_model_but_for_its_weights(finished, inputs):
    export, source = finished / "actor" / "export", inputs / "policy"
    policy = AutoModelForCausalLM.from_pretrained(export)
    assert policy.config.attention_dropout == 0.1
    tokenizer, original = AutoTokenizer.from_pretrained(export), AutoTokenizer.from_pretrained(source)
    assert tokenizer.get_vocab() == original.get_vocab()
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.pad_token == original.pad_token
    assert tokenizer("w3 w4")["input_ids"] == original("w3 w4")["input_ids"]
    before, after = (load_file(folder / "model.safetensors") for folder in (source, export))
    assert before.keys() == after.keys()
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    critic_export = json.loads((finished / "actor/checkpoints/step_000006/manifest.json").read_text())["critic"][
        "export"
    ]
    critic = AutoModelForSequenceClassification.from_pretrained(critic_export)
    assert critic.config.num_labels == 1


def test_the_last_checkpoints_of_both_sides_convert_to_their_exports(finished, tmp_path):
    (critic,) = (finished / "critic" / "checkpoints").glob("*-step_000006")
    exports = {
        finished / "actor/checkpoints/step_000006": finished / "actor" / "export",
        critic: finished / "critic" / "exports" / critic.name / "critic",
    }
    for number, (checkpoint, export) in enumerate(exports.items()):
        converted = warm.run(
            ["trainers/export_checkpoint.py", str(checkpoint), str(tmp_path / str(number))], timeout=120
        )
        assert converted.returncode == 0, converted.stderr
        assert file_digests(tmp_path / str(number)) == file_digests(export)


@pytest.mark.more
def test_both_exports_start_the_next_round_which_logs_to_wandb_offline(finished, inputs, tmp_path):
    """The policy goes through vLLM, the probe and the export check once more; the critic serves as reward model."""
    manifest = json.loads((finished / "actor/checkpoints/step_000006/manifest.json").read_text())
    reward_model = f"model.path={manifest['critic']['export']}"
    (tmp_path / "critic").mkdir()
    server, port = start_server(tmp_path / "critic", *server_overrides(inputs), reward_model)
    next_round = [
        f"model.path={finished / 'actor' / 'export'}", "algorithm.max_steps=2", "algorithm.val_check_interval=0",
        "checkpoint.keep_best=false",
        "tracking=wandb", "tracking.wandb.offline=true", "tracking.wandb.entity=our-team",
    ]  # fmt: skip
    actor = start_actor(tmp_path / "actor", port, *actor_overrides(inputs), *next_round)
    try:
        assert actor.wait(120) == 0, actor.output()
    finally:
        actor.kill()
        assert server.terminate() == 0
    first = metrics(tmp_path / "actor")[0]
    assert first["train_rollouts/init_policy_kl"] == pytest.approx(0, abs=1e-4)
    assert first["train_rollouts/sampler_logprob_gap_max"] < 1e-3
    (recorded,) = (tmp_path / "actor" / "wandb").glob("offline-run-*/*.wandb")
    assert b"our-team" in recorded.read_bytes()


def test_validation_counts_passes_and_the_best_policy_is_kept(finished):
    rows = [row for row in metrics(finished / "actor") if "val_rollouts/rewards" in row]
    assert all(0 <= row["val_rollouts/pass@1"] <= row["val_rollouts/pass@2"] <= 1 for row in rows)
    best = max(rows, key=lambda row: row["val_rollouts/rewards"])
    note = json.loads((finished / "actor" / "best" / "best.json").read_text())
    assert note == {"step": best["step"], "val_rollouts/rewards": best["val_rollouts/rewards"]}
    AutoModelForCausalLM.from_pretrained(finished / "actor" / "best")


def test_the_kl_coefficient_moves_towards_its_target_once_the_policy_learns(finished):
    coefficients = [row["train_rollouts/kl_coef"] for row in metrics(finished / "actor")[1:]]
    # Step 1 trains the critic alone. KL is 0 in step 2: 48 samples of a horizon of 500, the error clipped at -.2.
    assert coefficients[:3] == [0.01, 0.01, pytest.approx(0.01 * (1 - 0.2 * 48 / 500))]


MOMENTS = [
    ("mid-rollout", "request", "critic_infer", 2 * 2 + 2),  # two requests a rollout: in the third
    ("mid-train-part", "request", "critic_train", 8),  # several parts a step: some are staged
    ("between the two saves", "response", "critic_save", 1),  # the critic's half is durable, the actor's is not
]


def test_killing_both_processes_changes_nothing(finished, inputs, tmp_path):
    """SIGKILL in mid-rollout, in mid-train-part and between the two saves, in one run: same metrics, same weights."""
    (tmp_path / "critic").mkdir()
    plug = Plug()
    port = 0
    with proxy(lambda: port, plug) as proxy_port:
        for name, direction, endpoint, count in [*MOMENTS, ("never", "", "", 0)]:
            plug.arm(direction, endpoint, count)
            server, port = start_server(tmp_path / "critic", *server_overrides(inputs))
            actor = start_actor(tmp_path / "actor", proxy_port, *actor_overrides(inputs))
            plug.processes = [server, actor]
            try:
                code = actor.wait(240)
                assert (name == "never") == (code == 0), actor.output()
                assert plug.pulled == (name != "never")
            finally:
                actor.kill()
                server.kill()
    assert actor.output().count("resumed from step") == 3
    assert without_timers(metrics(tmp_path / "actor")) == without_timers(metrics(finished / "actor"))
    for name in ("actor/export/model.safetensors",):
        assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()
    critics = [
        sorted((folder / "critic" / "exports").glob("*/critic/model.safetensors")) for folder in (tmp_path, finished)
    ]
    assert critics[0][-1].read_bytes() == critics[1][-1].read_bytes()


@pytest.mark.more
def test_an_actor_outlives_its_servers_and_nothing_changes(finished, inputs, tmp_path):
    """The server is killed while the first checkpoint is written, killed in the first step, and told to stop in the fourth."""
    (tmp_path / "critic").mkdir()
    port, left = 0, [
        ("response", "critic_save", 1, signal.SIGKILL), ("request", "critic_train", 2, signal.SIGKILL),
        ("request", "critic_infer", 3 * 2 + 1, signal.SIGTERM),
    ]  # fmt: skip

    def watch(direction: str, endpoint: str) -> None:
        if not left or left[0][:2] != (direction, endpoint):
            return
        *moment, count, number = left[0]
        left[0] = (*moment, count - 1, number)
        if count == 1:
            left.pop(0)
            server.signal(number)

    with proxy(lambda: port, watch) as proxy_port:
        server, port = start_server(tmp_path / "critic", *server_overrides(inputs))
        actor = start_actor(tmp_path / "actor", proxy_port, *actor_overrides(inputs))
        deadline = time.monotonic() + 240
        try:
            while (code := actor.poll()) is None:
                assert time.monotonic() < deadline, actor.output()
                if server.poll() is not None:
                    server, port = start_server(tmp_path / "critic", *server_overrides(inputs))
                time.sleep(0.1)
        finally:
            actor.kill()
            server.kill()
    assert (code, left) == (0, []), actor.output()
    assert without_timers(metrics(tmp_path / "actor")) == without_timers(metrics(finished / "actor"))
    assert (tmp_path / "actor/export/model.safetensors").read_bytes() == (
        finished / "actor/export/model.safetensors"
    ).read_bytes()


@pytest.mark.more
def test_sigusr1_ends_a_run_with_a_checkpoint_and_changes_nothing(finished, inputs, tmp_path):
    """While it loads, which it outlives until the first step is done, and in mid-run; the same metrics and weights."""
    (tmp_path / "critic").mkdir()
    server, port = start_server(tmp_path / "critic", *server_overrides(inputs))
    checkpoints = tmp_path / "actor" / "checkpoints"
    try:
        for moment in ("rows", f"PPO 2/{STEPS}", None):
            actor = start_actor(tmp_path / "actor", port, *actor_overrides(inputs))
            seen = len(actor.output())
            try:
                if moment is not None:
                    wait_for_output(actor, moment, after=seen)
                    actor.signal(signal.SIGUSR1)
                code = actor.wait(240)
            finally:
                actor.kill()
            assert code == (0 if moment is None else PREEMPTED_EXIT), actor.output()
            step = int(max(folder.name for folder in checkpoints.iterdir()).removeprefix("step_"))
            assert step == {"rows": 1, None: STEPS}.get(moment, step)
            assert (step < STEPS) == (moment is not None)
            assert (tmp_path / "actor" / "export").exists() == (moment is None)
    finally:
        assert server.terminate() == 0
    assert without_timers(metrics(tmp_path / "actor")) == without_timers(metrics(finished / "actor"))
    assert (tmp_path / "actor/export/model.safetensors").read_bytes() == (
        finished / "actor/export/model.safetensors"
    ).read_bytes()


@pytest.mark.more
def test_a_disk_that_is_full_for_a_while_costs_nothing(finished, inputs, tmp_path):
    """The actor's refuses three checkpoints in a row, the server's one more: training goes on and nothing changes."""
    (tmp_path / "critic").mkdir()
    server, port = start_server(tmp_path / "critic", *server_overrides(inputs))
    store = CheckpointStore(tmp_path / "actor" / "checkpoints", keep_last=2)
    begun: list[int] = []
    saves, meanwhile = 0, None

    def limit_files(process: Process, size: int) -> None:
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))

    def watch(direction: str, endpoint: str) -> None:
        """At the first question of a step's rollout the checkpoint of the step before it is being written."""
        nonlocal saves, meanwhile
        saves += (direction, endpoint) == ("response", "critic_save")
        if (direction, endpoint) != ("request", "critic_infer") or not (tmp_path / "actor/metrics.jsonl").exists():
            return
        step = len(metrics(tmp_path / "actor"))  # there is a row for step 0
        if step in begun:
            return
        begun.append(step)
        if step > 2:  # two answers for each of the steps 0, 2, 3, ...
            deadline = time.monotonic() + 60
            while saves < 2 * (step - 1) and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(1)
        if step == 2:
            limit_files(actor, FULL_DISK_BYTES)
        if step == 5:
            meanwhile = store.latest()
            limit_files(actor, psutil.RLIM_INFINITY)
            limit_files(server, FULL_DISK_BYTES)
        if step == 6:
            limit_files(server, psutil.RLIM_INFINITY)

    with proxy(lambda: port, watch) as proxy_port:
        actor = start_actor(tmp_path / "actor", proxy_port, *actor_overrides(inputs))
        try:
            assert actor.wait(240) == 0, actor.output()
        finally:
            actor.kill()
            assert server.terminate() == 0
    told = re.findall(r"training goes on.*\(failure (\d)", actor.output())
    assert told == ["1", "2", "3", "4"] and meanwhile.step == 0, actor.output()
    assert [manifest.step for manifest in store.undamaged()] == [6, 0]
    assert without_timers(metrics(tmp_path / "actor")) == without_timers(metrics(finished / "actor"))
    for pattern in ("actor/export/model.safetensors", "critic/exports/*/critic/model.safetensors"):
        (left,), (right,) = tmp_path.glob(pattern), finished.glob(pattern)
        assert left.read_bytes() == right.read_bytes()
