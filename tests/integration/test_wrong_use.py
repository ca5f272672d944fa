"""A user's mistake gets one clear sentence and a non-zero exit, and nothing is lost."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_style_rlhf.checkpoint.store import CheckpointStore
from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.schema.remote_critic import RemoteCriticConfig
from tests.integration.test_policy_families import FAMILIES, save
from tests.support.entry_points import refusal
from tests.support.models import save_policy, save_reward_model
from tests.support.paths import ROOT
from tests.support.processes import start_actor, start_server

PYTHON = {"server": ROOT / ".venv-server/bin/python", "actor": ROOT / ".venv-actor/bin/python"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "policy")
    save_reward_model(folder / "reward")
    save_reward_model(folder / "two_labels", num_labels=2)
    save_reward_model(folder / "other_tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "reward")
    tokenizer.add_tokens(["w62"])
    tokenizer.save_pretrained(folder / "other_tokenizer")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(40)))
    (folder / "no_weights").mkdir()
    (folder / "no_weights" / "config.json").write_text("{}")
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "w1 " * 50}) + "\n")
    (folder / "own.jsonl").write_text('{"prompt": "w1"}\n{"prompt": "w2", "own": {"top_p": 0.9}}\n')
    (save_policy(folder / "no_weights") / "model.safetensors").unlink()
    quantized = json.loads((save_policy(folder / "quantized") / "config.json").read_text())
    quantized["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "quantized" / "config.json").write_text(json.dumps(quantized))
    save(folder / "latent", FAMILIES["deepseek_v2"])
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"prompt": "w1"}\n{"prompt": \n')
    return folder


@pytest.fixture(scope="module")
def server_port(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    server, port = start_server(folder, "model.dtype=float32", f"model.path={inputs / 'reward'}")
    yield port
    server.terminate()


def actor_arguments(inputs: Path, output_dir: Path) -> list[str]:
    return [
        f"run.output_dir={output_dir}", f"model.path={inputs / 'policy'}", "model=fp32",
        f"data.train_path={inputs / 'prompts.jsonl'}", "algorithm.max_steps=1", "algorithm.num_rollout_samples=8",
        "generation.max_length=8", "generation.kv_cache_gib=0.1", "remote_critic_rm.wait_for_server_s=0",
    ]  # fmt: skip


ACTOR_MISTAKES = {
    "no server": (["remote_critic_rm.port=9"], r"no critic server answers at 127\.0\.0\.1:9: start servers/serve_ppo_critic\.py"),
    "missing prompts": (["data.train_path={inputs}/none.jsonl"], r"none\.jsonl"),
    "empty data set": (["data.train_path={inputs}/empty.jsonl"], r"empty\.jsonl.*(empty|no rows)"),
    "broken JSON": (["data.train_path={inputs}/broken.jsonl"], r"broken\.jsonl.*line 2"),
    "prompts all too long": (["data.train_path={inputs}/long.jsonl", "data.max_prompt_length=10"], r"longer than 10 tokens"),
    "wrong key": (["data.prompt_key=question"], r"question.*prompt"),
    "missing model": (["model.path={inputs}/none"], r"model\.path=.*none: there is no such folder"),
    "a quantized policy": (["model.path={inputs}/quantized"], r"quantized is quantized \(quantization_config .*: gptq\)"),
    "latent attention on CPUs": (["model.path={inputs}/latent"], r"kv_lora_rank .*: use generation\.backend=hf"),
    "adapters for experts": (["model.path={inputs}/latent", "generation=hf", "model.lora.rank=4",
        "model.lora.target_modules=[q_proj,up_proj]"], r"up_proj names no linear layer .* blocks with experts"),
    "all of them at once": (
        ["model.path=./none", "data.train_path={inputs}/none.jsonl", "remote_critic_rm.token.token_file={inputs}/token"],
        r"model\.path=\./none: there is no such folder.*; data\.train_path=.*; remote_critic_rm\.token\.token_file=.*"),
    "unknown key": (["algorithm.ppo_epoch=2"],
        r"key algorithm\.ppo_epoch: Key 'ppo_epoch' not in 'AlgorithmConfig', did you mean ppo_epochs\?"),
    "unknown preset": (["algorithm=grop"], r"Could not find 'algorithm/grop' Available options in 'algorithm': dr_grpo grpo"),
    "wrong type": (["algorithm.ppo_epochs=many"], r"algorithm\.ppo_epochs.*many"),
    "out of range": (["algorithm.gae_lambda=1.5"], r"algorithm\.gae_lambda=1\.5 is not possible: expected 0 to 1"),
    "not a choice": (["algorithm.kl_estimator=k4"], r"kl_estimator=k4 is not possible: expected one of k1, k2, k3, abs"),
    "impossible combination": (["algorithm.val_check_interval=5"],
        r"val_check_interval=5 needs validation prompts: set data\.val_path"),
    "the best of nothing": (["checkpoint.keep_best=true"], r"keep_best=true needs validation .* algorithm\.val_check_interval"),
    "sampler against itself": (["algorithm.old_logprobs=sampler", "correction=tis"],
        r"correction\.kind=tis weighs trainer against sampler, .* use algorithm\.old_logprobs=trainer, or .*kind=none"),
    "no gap to see": (["algorithm.old_logprobs=sampler", "audit.max_logprob_gap=0.1"],
        r"audit\.max_logprob_gap=0\.1 compares sampler and trainer, .* or audit\.max_logprob_gap=null"),
    "a row that is sampled from a part, before anything is loaded": (["algorithm.old_logprobs=sampler", "data.sampling_key=own",
        "data.train_path={inputs}/own.jsonl", "model.path={inputs}/no_weights"],
        r"own\.jsonl line 2: top_p=0\.9 .* algorithm\.old_logprobs=trainer"),
    "a row that is sampled from a part, tried out": (["algorithm.old_logprobs=sampler", "data.sampling_key=own",
        "data.train_path={inputs}/own.jsonl", "--dry-run"], r"own\.jsonl line 2: top_p=0\.9 .* algorithm\.old_logprobs=trainer"),
    "a buffer beyond the length": (["algorithm.shaping.overlong_buffer=9"],
        r"overlong_buffer=9 is not possible: expected 0 to generation\.max_length=8"),
    "too long for the model": (["generation.max_length=127"], r"make 129, more than the 128 positions"),
    "too long for the model, tried out": (["generation.max_length=127", "--dry-run"], r"make 129, more than the 128 positions"),
    "too few prompts, tried out": (["algorithm.max_steps=-1", "algorithm.num_rollout_samples=4096", "--dry-run"],
        r"prompts are fewer than one rollout takes \(4096\)"),
    "sharded adapters": (["engine=zero3", "model.lora.rank=4", "model.path={inputs}/none"],
        r"zero_stage=3 with model\.lora\.rank=4 .*: use engine\.zero_stage=2"),
    "a team of more than all ranks, before anything is loaded": (
        ["generation.tensor_parallel_size=2", "model.path={inputs}/no_weights"], r"tensor_parallel_size=2 with 1 ranks"),
    "a replica's URL": (["reward.server.replicas=['http://node:9']"], r"replicas=http://node:9 .*: expected host:port"),
    "must resume nothing": (["run.resume=must"], r"run\.resume=must but .* holds no checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ACTOR_MISTAKES)
def test_the_actor_refuses(mistake, inputs, server_port, tmp_path):
    overrides, sentence = ACTOR_MISTAKES[mistake]
    overrides = [override.format(inputs=inputs, port=server_port) for override in overrides]
    arguments = actor_arguments(inputs, tmp_path)
    if not any("port" in override for override in overrides):
        arguments.append(f"remote_critic_rm.port={server_port}")
    error = refusal("trainers/train_ppo_actor.py", [*arguments, *overrides])
    assert re.search(sentence, error), error


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin", **environment}
    )


def one_sentence(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_the_server_refuses_a_reward_model_with_two_labels(inputs, tmp_path):
    command = [str(PYTHON["server"]), "servers/serve_ppo_critic.py", f"run.output_dir={tmp_path}"]
    done = run([*command, f"model.path={inputs / 'two_labels'}", "server.port=0"])
    assert re.search(
        r"two_labels has 2 labels and label_weights are none: give it one number per label", one_sentence(done)
    )


def test_the_actor_refuses_a_server_with_another_tokenizer(inputs, tmp_path):
    (tmp_path / "critic").mkdir()
    server, port = start_server(tmp_path / "critic", "model.dtype=float32", f"model.path={inputs / 'other_tokenizer'}")
    arguments = [*actor_arguments(inputs, tmp_path / "actor"), f"remote_critic_rm.port={port}"]
    error = refusal("trainers/train_ppo_actor.py", arguments)
    server.terminate()
    assert re.search(rf"127\.0\.0\.1:{port} has the tokenizer [0-9a-f]{{16}}, the policy [0-9a-f]{{16}}: serve", error)


def test_a_wrong_token_and_a_wrong_port_are_told_apart(inputs, tmp_path):
    (tmp_path / "critic").mkdir()
    (tmp_path / "token").write_text("right")
    server, port = start_server(
        tmp_path / "critic",
        "model.dtype=float32",
        f"model.path={inputs / 'reward'}",
        f"server.token.token_file={tmp_path / 'token'}",
    )
    arguments = [*actor_arguments(inputs, tmp_path / "actor"), f"remote_critic_rm.port={port}"]
    wrong_token = refusal("trainers/train_ppo_actor.py", arguments, NSR_CRITIC_TOKEN="sesame")
    server.terminate()
    assert "refused the token" in wrong_token
    assert "sesame" not in wrong_token
    stopped = refusal("trainers/train_ppo_actor.py", arguments)
    assert f"no critic server answers at 127.0.0.1:{port}" in stopped


def test_an_unsupported_head_size_gets_one_sentence_and_the_way_out_works(inputs, server_port, tmp_path):
    policy = save_policy(tmp_path / "policy", hidden_size=32, num_attention_heads=4)
    arguments = [*actor_arguments(inputs, tmp_path), f"model.path={policy}"]
    refused = start_actor(tmp_path / "vllm", server_port, *arguments)
    assert refused.wait(120) == 2, refused.output()
    assert re.search(r"heads of size 8 but vLLM on CPU knows 32, 64, .* use generation\.backend=hf", refused.output())
    way_out = start_actor(
        tmp_path / "hf", server_port, *arguments, "generation=hf", "algorithm.truncated_samples=mask", "--dry-run"
    )
    assert way_out.wait(120) == 0, way_out.output()
    assert re.search(r"rollout took [\d.]+ s and training [\d.]+ s, .* a step lasts [\d.]+ s while", way_out.output())


@pytest.mark.more
def test_a_dry_run_that_fails_leaves_nothing_on_the_server(inputs, server_port, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    raise ValueError('no rewards')\n"
    )
    reward = [f"reward.function.path={tmp_path / 'reward.py'}", "reward.function.weight=1"]
    dry = start_actor(tmp_path, server_port, *actor_arguments(inputs, tmp_path), *reward, "--dry-run")
    assert dry.wait(120) != 0 and "no rewards" in dry.output()
    with RemoteCritic(RemoteCriticConfig(port=server_port)) as critic:
        status = critic.status()
    assert (status.last_committed, status.critic_step) == (None, 0)
    assert not (tmp_path / "dry_run").exists()


def test_a_cache_without_room_for_one_sequence_is_refused_by_its_own_key(inputs, server_port, tmp_path):
    refused = start_actor(tmp_path, server_port, *actor_arguments(inputs, tmp_path), "generation.kv_cache_gib=1e-5")
    assert refused.wait(120) == 2, refused.output()
    assert re.search(
        r"error: generation\.kv_cache_gib=\S* leaves vLLM no room for one sequence of 10 tokens", refused.output()
    )
    assert "Traceback" not in refused.output()


FULL_DISK = """
set -eu
mount -t tmpfs -o size={size} tmpfs {folder}/checkpoints
{actor} checkpoint.save_interval=2 algorithm.max_steps=6 checkpoint.max_failed_saves=1 && exit 1 || echo "exit $?"
cp {folder}/metrics.jsonl {folder}/metrics_of_the_first.jsonl
ls {folder}/checkpoints
mount --options-source=disable -o remount,size=64m {folder}/checkpoints
{actor} checkpoint.save_interval=2 algorithm.max_steps=6 run.resume=must
ls {folder}/checkpoints
"""


def test_a_full_disk_is_one_sentence_and_the_last_good_checkpoint_survives(inputs, tmp_path):
    """The disk is a real, small one: it holds two checkpoints and not a third.

    It grows without the options that it has already: an ordinary user's id among them is none in a namespace of its own.
    """
    (tmp_path / "critic").mkdir()
    server, port = start_server(tmp_path / "critic", "model.dtype=float32", f"model.path={inputs / 'reward'}")
    folder = tmp_path / "actor"
    (folder / "checkpoints").mkdir(parents=True)
    arguments = [*actor_arguments(inputs, folder), f"remote_critic_rm.port={port}"]
    actor = " ".join([str(PYTHON["actor"]), "trainers/train_ppo_actor.py", *arguments])
    script = FULL_DISK.format(size="2m", folder=folder, actor=actor)
    # Without HOME, the root of the namespace would look for the token in the machine's /root.
    done = run(["unshare", "--mount", "--map-root-user", "bash", "-c", script], HOME=str(Path.home()))
    server.terminate()
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, after = done.stdout.partition("exit 2\n")
    folders = [line for line in after.splitlines() if line.startswith("step_")]
    assert folders == ["step_000000", "step_000002", "step_000004", "step_000006"]
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(
        rf"step 4 could not be saved in {folder}/checkpoints \(disk full: \S+ GiB missing in {folder}/checkpoints\): make room; "
        "started again, the run resumes from step 2", sentence,
    )  # fmt: skip
    assert "resumed from step 2" in done.stderr
    steps = (folder / "metrics_of_the_first.jsonl").read_text().splitlines()
    assert json.loads(steps[-1])["step"] == 5  # the step in which the disk refused, and none that would be lost as well


FULL_DISK_OF_LOGS = """
set -eu
mkdir -p {disk}
mount -t tmpfs -o size={size} tmpfs {disk}
{actor} && exit 1 || echo "exit $?"
ls {folder}/checkpoints/*/manifest.json
mount --options-source=disable -o remount,size=64m {disk}
{actor}
ls {folder}/rollouts
"""


@pytest.mark.more
@pytest.mark.parametrize(("full", "size"), [("metrics.jsonl", "8k"), ("rollouts", "80k")])
def test_a_full_disk_of_metrics_or_rollouts_is_one_sentence_and_the_same_command_goes_on(full, size, inputs, tmp_path):
    """The disk is a real one of a few pages, which are full after a few steps."""
    folder = tmp_path / "run"
    disk = folder / full
    if full == "metrics.jsonl":
        folder.mkdir()
        disk.symlink_to(tmp_path / "disk" / full)
        disk = tmp_path / "disk"
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(len(set(query))) for query in queries]\n"
    )
    arguments = [
        *actor_arguments(inputs, folder), "algorithm=grpo", "algorithm.max_steps=8", "algorithm.num_rollout_samples=16",
        "generation=hf", "reward=function", f"reward.function.path={tmp_path}/reward.py", "checkpoint.save_interval=1",
        "checkpoint.keep_last=20",
    ]  # fmt: skip
    actor = " ".join([str(PYTHON["actor"]), "trainers/train_ppo_actor.py", *arguments])
    script = FULL_DISK_OF_LOGS.format(size=size, disk=disk, folder=folder, actor=actor)
    done = run(["unshare", "--mount", "--map-root-user", "bash", "-c", script], HOME=str(Path.home()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    expected = (
        rf"{folder}/{full}\S* cannot be written \(disk full: {disk}\): make room and start again, the run goes on"
    )
    assert re.search(expected, sentence), sentence
    _, _, after = done.stdout.partition("exit 2\n")
    saved = [int(step) for step in re.findall(r"step_(\d+)/manifest", after)]
    assert saved == list(range(len(saved))) and 1 < len(saved) < 8
    assert f"resumed from step {saved[-1]}" in done.stderr
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))
    assert [int(step) for step in re.findall(r"step_(\d+)\.parquet", after)] == steps


def test_a_used_server_and_a_new_run_do_not_mix(inputs, tmp_path):
    (tmp_path / "critic").mkdir()
    server, port = start_server(tmp_path / "critic", "model.dtype=float32", f"model.path={inputs / 'reward'}")
    first = start_actor(tmp_path / "first", port, *actor_arguments(inputs, tmp_path / "first"))
    assert first.wait(120) == 0, first.output()
    second = start_actor(tmp_path / "second", port, *actor_arguments(inputs, tmp_path / "second"))
    assert second.wait(120) == 2
    again = start_actor(tmp_path / "first", port, *actor_arguments(inputs, tmp_path / "first"), "run.resume=never")
    assert again.wait(120) == 2
    with RemoteCritic(RemoteCriticConfig(port=port)) as critic:
        holder = critic.status().lease_holder
    server.terminate()
    assert holder == CheckpointStore(tmp_path / "first" / "checkpoints", keep_last=2).latest().run_id
    assert "has already trained 1 steps but" in second.output()
    assert "run.resume=never but" in again.output()
