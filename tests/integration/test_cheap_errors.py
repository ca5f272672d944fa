"""What can be known of a mistake before torch, vLLM or DeepSpeed is imported, or another program is started, is said then.

Each program runs as a user starts it, in a process of its own whose CPU seconds are counted, those of its children included.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.models import save_policy, save_reward_model
from tests.support.paths import ROOT, own_python

WITHOUT_TOKENIZER, WITH_TOKENIZER = 2.0, 5.0
"""CPU seconds."""
DEAR = re.compile(r"\| +(torch|vllm|deepspeed|pytriton|pytorch_lightning|datasets)$", re.MULTILINE)
"""An import of a library that no check may wait for, as Python reports imports."""


@dataclass(frozen=True)
class Refused:
    code: int
    sentence: str
    cpu_s: float
    imports: str


def start(script: str, arguments: list[str]) -> Refused:
    environment = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "RANK")}
    process = subprocess.Popen(
        [str(ROOT / own_python(ROOT / script)), script, *arguments],
        cwd=ROOT, env={**environment, "PYTHONPROFILEIMPORTTIME": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    written = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    said = [line for line in written.splitlines() if not line.startswith("import time:")]
    return Refused(process.returncode, "\n".join(said), used.ru_utime + used.ru_stime, written)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_policy(folder / "policy")
    save_reward_model(folder / "reward")
    save_reward_model(folder / "two_labels", num_labels=2)
    quantized = json.loads((save_policy(folder / "quantized") / "config.json").read_text())
    (folder / "quantized" / "config.json").write_text(json.dumps(quantized | {"quantization_config": {"bits": 4}}))
    files = {
        "prompts": [{"prompt": f"w{i} w{i + 1}"} for i in range(40)],
        "questions": [{"question": "w1", "answer": "w2"}] * 3000,
        "lists": [{"prompt": ["w1", "w2"]}] * 40,
        "turns": [{"prompt": [{"role": "user", "content": "w1"}]}] * 40,
        "long": [{"prompt": "w1 " * 50, "completion": "w2", "label": True}] * 40,
        "answers": [{"prompt": "w1", "response": 3}] * 40,
        "pairs": [{"prompt": "w1", "chosen": "w2 w3", "rejected": "w4", "margin": "much"}] * 40,
        "long_pairs": [{"prompt": "w1 " * 50, "chosen": "w2 w3", "rejected": "w4"}] * 40,
        "equal": [{"prompt": "w1", "chosen": "w2", "rejected": "w2"}] * 40,
        "stars": [{"prompt": "w1", "completion": "w2", "label": 4}] * 40,
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("class Rewards:\n    def reward_func(queries, prompts, labels): ...\n")
    (folder / "environment.py").write_text("class Environment: ...\n")
    return folder


ACTOR = [
    "model.path={}/policy", "data.train_path={}/prompts.jsonl", "algorithm.num_rollout_samples=8", "generation.max_length=8",
]  # fmt: skip
LOCAL = [*ACTOR, "critic.model.path={}/reward"]
EVALUATION = ["checkpoints=[{}/policy]", "data.path={}/prompts.jsonl", "generation.max_length=8"]
PROGRAMS = {
    "actor": ("trainers/train_ppo_actor.py", ACTOR),
    "local": ("trainers/train_ppo_local.py", LOCAL),
    "ray": ("trainers/train_ppo_ray.py", LOCAL),
    "critic": ("servers/serve_ppo_critic.py", ["server.port=0"]),
    "rewards": ("servers/serve_reward_model.py", ["server.port=0"]),
    "sft": ("trainers/train_sft.py", ["model.path={}/policy"]),
    "reward_model": ("trainers/train_reward_model.py", ["model.path={}/policy"]),
    "dpo": ("trainers/train_dpo.py", ["model.path={}/policy"]),
    "kto": ("trainers/train_kto.py", ["model.path={}/policy"]),
    "evaluate": ("trainers/evaluate.py", EVALUATION),
    "inspect": ("trainers/inspect_data.py", ["model.path={}/policy"]),
}  # fmt: skip
KEYLESS = r"questions\.jsonl line 1 has no key '{}' \(the keys there are: question, answer\): set data\."
FEW = r"40 prompts are fewer than one rollout takes \(4096\)"
CAUSAL = r"policy is a causal LM \(LlamaForCausalLM\), no reward model"
LABELS = r"two_labels has 2 labels and label_weights are none"
TOO_LONG = r"all 40 rows were dropped \(40 longer than 10 tokens\)"
ROOM = r"generation\.max_length=128 leaves no prompt a place in the 128 positions of"
MAKE = r"make 129, more than the 128 positions of"
WITHOUT = [
    ("actor", ["data.train_path={}/questions.jsonl"], KEYLESS.format("prompt")),
    ("actor", ["data.train_path={}/prompts.jsonl", "data.val_path={}/questions.jsonl"], KEYLESS.format("prompt")),
    ("actor", ["data.train_path={}/lists.jsonl"], r"lists\.jsonl line 1: 'prompt' holds a list, .* set data=messages"),
    ("actor", ["data.train_path={}/lists.jsonl", "data=messages", "data.prompt_key=prompt"], r"is not a list of messages"),
    ("actor", ["algorithm.num_rollout_samples=4096"], FEW),
    ("actor", ["reward=function", "reward.function.path={}/reward.py", "algorithm=grpo"], r"it has no function reward_func"),
    ("actor", ["agent.path={}/reward.py"], r"it has no class Environment, set agent\.name"),
    ("actor", ["model.path={}/quantized"], r"quantized is quantized"),
    ("actor", ["generation.max_length=128"], ROOM),
    ("actor", ["agent.path={}/environment.py", "agent.max_tokens=129"], r"agent\.max_tokens=129 is more than the 128 positions"),
    ("actor", ["data.train_path={}/none.jsonl", "--dry-run"], r"none\.jsonl: it does not exist"),
    ("local", ["data.train_path={}/questions.jsonl"], KEYLESS.format("prompt")),
    ("local", ["algorithm.num_rollout_samples=4096"], FEW),
    ("local", ["critic.model.path={}/policy"], CAUSAL),
    ("local", ["critic.model.path={}/two_labels"], LABELS),
    ("ray", ["data.train_path={}/questions.jsonl"], KEYLESS.format("prompt")),
    ("critic", ["model.path={}/policy"], CAUSAL),
    ("critic", ["model.path={}/two_labels"], LABELS),
    ("critic", ["model.path={}/reward", "value_model.path={}/none"], r"value_model\.path=.*none: there is no such folder"),
    ("rewards", ["model.path={}/policy"], CAUSAL),
    ("rewards", ["model.path={}/two_labels", "reward.label_weights=[1,2,3]"], r"2 labels and label_weights are 3 weights"),
    ("sft", ["data.train_path={}/questions.jsonl"], KEYLESS.format("prompt")),
    ("sft", ["data.train_path={}/answers.jsonl"], r"answers\.jsonl line 1: 'response' holds int, expected a string"),
    ("reward_model", ["data.train_path={}/questions.jsonl"], KEYLESS.format("chosen")),
    ("reward_model", ["data.train_path={}/pairs.jsonl", "data.margin_key=margin"], r"'margin' holds str, expected a number"),
    ("dpo", ["data.train_path={}/equal.jsonl"], r"all 40 rows were dropped \(40 with equal responses\)"),
    ("kto", ["data.train_path={}/stars.jsonl"], r"stars\.jsonl line 1: 'label' holds 4, expected true or false"),
    ("evaluate", ["data.path={}/questions.jsonl"], KEYLESS.format("prompt")),
    ("evaluate", ["reward.model.path={}/policy"], CAUSAL),
    ("evaluate", ["generation.max_length=128"], ROOM),
    ("inspect", ["stage=kto", "data.train_path={}/questions.jsonl"], r"questions\.jsonl line 1 has no key 'label'"),
]  # fmt: skip
WITH = [
    ("actor", ["data.train_path={}/long.jsonl", "data.max_prompt_length=10"], TOO_LONG),
    ("actor", ["generation.max_length=127"], MAKE),
    ("actor", ["data.train_path={}/turns.jsonl", "data=messages"], r"the tokenizer has none: set data\.chat_template"),
    ("local", ["generation.max_length=127"], MAKE),
    ("sft", ["data.train_path={}/long.jsonl", "data.max_length=10"], TOO_LONG),
    ("reward_model", ["data.train_path={}/long_pairs.jsonl", "data.max_length=10"], TOO_LONG),
    ("kto", ["data.train_path={}/long.jsonl", "data.max_length=10"], TOO_LONG),
    ("evaluate", ["generation.max_length=127"], r"makes 129 tokens, more than the 128 positions of"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "mistake", "sentence", "limit_s"),
    [*((*case, WITHOUT_TOKENIZER) for case in WITHOUT), *((*case, WITH_TOKENIZER) for case in WITH)],
    ids=[f"{program}: {mistake[-1]}" for program, mistake, _ in [*WITHOUT, *WITH]],
)
def test_a_mistake_costs_a_few_seconds(program, mistake, sentence, limit_s, inputs, tmp_path):
    script, usual = PROGRAMS[program]
    given = [word.replace("{}", str(inputs)) for word in [*usual, *mistake]]
    run = [] if program == "inspect" else [f"run.output_dir={tmp_path}/run", "run.device=cpu"]
    refused = start(script, [*run, *given])
    assert refused.code == 2, refused.sentence
    (line,) = refused.sentence.splitlines()
    assert line.startswith("error: ") and re.search(sentence, line), line
    assert not DEAR.findall(refused.imports)
    assert refused.cpu_s < limit_s
    assert not (tmp_path / "run").exists()
