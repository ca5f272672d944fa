"""trainers/plan.py as a user runs it."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_style_rlhf.schema.actor import PPOActorConfig
from tests.support import warm
from tests.support.models import save_policy, save_reward_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "policy", max_position_embeddings=4096)
    save_reward_model(folder / "reward", max_position_embeddings=4096)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "w1 w2 w3"}) + "\n")
    return folder


def plan(inputs: Path, *given: str, code: int = 0) -> tuple[str, str]:
    models = [f"model.path={inputs / 'policy'}", f"critic.model.path={inputs / 'reward'}"]
    done = warm.run(["trainers/plan.py", *models, "run.device=cpu", *given], timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_both_processes_are_planned_and_fit(inputs: Path):
    output, errors = plan(
        inputs, f"data.train_path={inputs / 'prompts.jsonl'}", "generation.max_length=8", "device_gib=4"
    )
    assert errors == "" and " s:" not in output
    assert "on a host of 4 GiB" in output
    for row in ("weights", "gradients", "optimizer states", "activations", "vLLM weights", "reward model", "total"):
        assert row in output
    assert re.search(r"KV cache\W+1\.00\W+-", output)


def test_engines_have_a_plan_of_their_own_and_the_actor_no_vllm(inputs: Path):
    given = (f"data.train_path={inputs / 'prompts.jsonl'}", "generation.max_length=8", "device_gib=8")
    lag = (
        "generation.engines.count=2",
        "algorithm.staleness=1",
        "algorithm.correction.kind=tis",
        "model.dtype=float32",
    )
    output, _ = plan(inputs, *given, *lag, "device_tflops=1", "device_gb_per_s=50")
    assert re.search(r"actor\W+engine, 2 of them\W+critic server", output)
    assert re.search(r"KV cache\W+-\W+1\.00\W+-", output) and "published weights" in output
    seconds = r"rollout +\S+ s: 1 x 256 sequences on each of 2 generators.*\n +training +\S+ s: .*\n.*staleness=0, and .*\nFrom "
    assert re.search(seconds, output), output


def test_what_cannot_fit_is_refused_with_three_changes(inputs: Path):
    _, errors = plan(inputs, "data.max_prompt_length=512", "device_gib=0.5", code=2)
    assert re.fullmatch(
        r"error: the actor needs [\d.]+ GiB and the critic server needs [\d.]+ GiB but the device is a host of 0.5 GiB; "
        r"what saves most: ([\w.]+=[\w.]+ \([\d.]+ GiB\)(, )?){3}\n",
        errors,
    )


def test_what_fits_alone_need_not_fit_together(inputs: Path):
    given = (f"data.train_path={inputs / 'prompts.jsonl'}", "generation.max_length=8", "device_gib=1.8")
    plan(inputs, *given)
    assert "the critic server needs" in plan(inputs, *given, "together=true", code=2)[1]


def test_in_turns_the_largest_phase_must_fit_and_not_the_sum(inputs: Path):
    gpu = ("run.device=cuda", f"data.train_path={inputs / 'prompts.jsonl'}", "generation.max_length=8", "device_gib=3")
    share = ("generation.gpu_memory_utilization=0.6", "together=true")
    assert "placement.share=turns (" in plan(inputs, *gpu, *share, code=2)[1]
    output, errors = plan(inputs, *gpu, *share, "placement.share=turns")
    sizes = re.search(
        r"generate ([\d.]+) GiB \(actor ([\d.]+), critic server ([\d.]+)\); score .*; train ([\d.]+) GiB", output
    )
    assert (
        errors == "" and sizes and float(sizes[1]) <= 3 and float(sizes[2]) > 2.2 and float(sizes[4]) < float(sizes[2])
    )
    _, errors = plan(inputs, *gpu, "generation.gpu_memory_utilization=0.95", "placement.share=turns", code=2)
    assert errors.startswith("error: the largest turn needs 3.8 GiB, generate 3.8")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("critic.engine.zero_stag=2", "zero_stag"),
        ("device_tflops=989", "device_gb_per_s=None is not possible: expected given together with device_tflops"),
        ("ranks=0", "ranks=0 is not possible"),
        ("model.path=/nowhere", "model.path=/nowhere: there is no such folder"),
        ("data.train_path=/nowhere.jsonl", "/nowhere.jsonl"),
    ],
)
def test_a_mistake_gets_one_sentence(inputs: Path, given: str, sentence: str):
    _, errors = plan(inputs, given, code=2)
    assert errors.count("\n") == 1 and sentence in errors


def test_the_plan_starts_from_the_actors_defaults(inputs: Path):
    def composed(script: str) -> dict[str, object]:
        given = ["--cfg", "job", "model.path=x", "data.train_path=x", "run.output_dir=x"]
        text = warm.run([script, *given], timeout=120).stdout
        return OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[return-value]

    planned = composed("trainers/plan.py")
    actor = composed("trainers/train_ppo_actor.py")
    assert {key: planned[key] for key in actor} == actor
    assert set(actor) == set(PPOActorConfig.__dataclass_fields__)
