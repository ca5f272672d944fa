"""The walk of docs/pipeline.md, command by command as they stand, at small scale."""

import json
import shlex
from pathlib import Path
from string import Template

import pytest
from transformers import AutoModelForCausalLM

from tests.support import warm
from tests.support.models import save_policy
from tests.support.pages import commands
from tests.support.paths import ROOT

SMALL = {
    "train_sft": ["trainer.max_steps=2", "trainer.batch_size=8"],
    "train_reward_model": ["trainer.max_steps=2", "trainer.batch_size=8"],
    "train_dpo": ["trainer.max_steps=2", "trainer.batch_size=8"],
    "train_kto": ["trainer.max_steps=2", "trainer.batch_size=8"],
    "train_ppo_local": [
        "algorithm.max_steps=1", "algorithm.num_rollout_samples=8", "generation.max_length=8", "generation.kv_cache_gib=0.1",
    ],
    "evaluate": ["generation.max_length=8", "generation.kv_cache_gib=0.1"],
}  # fmt: skip


def test_a_base_model_becomes_an_aligned_one(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"w{i} w{i + 1}", "response": " w3 w4", "chosen": " w5 w6", "rejected": f" w7 w{i}"}
        for i in range(16)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = dict.fromkeys(("SFT_ROWS", "PREFERENCE_PAIRS", "PROMPTS"), str(tmp_path / "rows.jsonl"))
    names["BASE_MODEL"] = str(save_policy(tmp_path / "base"))
    for command in commands(ROOT / "docs" / "pipeline.md"):
        words = shlex.split(Template(command).substitute(names).replace("outputs/", f"{tmp_path}/"))
        done = warm.run([*words[1:], *SMALL.get(Path(words[1]).stem, [])], timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    for export in ("sft/export", "ppo/actor/export", "dpo/export", "kto/export", "dpo_lora/export", "dpo_lora/merged"):
        AutoModelForCausalLM.from_pretrained(tmp_path / export)
    assert json.loads((tmp_path / "rm" / "export" / "config.json").read_text())["reward_std"] > 0
    assert (tmp_path / "evaluation" / "results.jsonl").is_file()


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "trainers").glob("*.py")))
def test_every_trainer_is_in_the_documentation(script: str) -> None:
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert f"trainers/{script}.py" in pages
