"""The pictures of README and docs come from a finished quickstart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_style_rlhf.ppo.recording import step_samples
from nemo_style_rlhf.tracking.rollout_files import write_step
from tests.support.paths import ROOT
from tests.support.rollout_files import byte_tokenizer
from tests.support.rollouts import collect


@pytest.mark.slow("draws pictures")
def test_the_curves_and_the_page_are_drawn_from_the_files_of_a_run(tmp_path: Path) -> None:
    actor, target = tmp_path / "quickstart" / "actor", tmp_path / "target"
    (actor / "rollouts").mkdir(parents=True)
    target.mkdir()
    names = ("rewards", "init_policy_kl", "response_lengths", "entropy", "truncated_fraction", "distinct_2")
    rows = [{"step": k, **{f"train_rollouts/{name}": 0.1 * k for name in names}} for k in range(1, 4)]
    (actor / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    experience = collect()
    write_step(actor / "rollouts", step_samples(3, experience, None), ["text"] * len(experience.rollouts))
    byte_tokenizer().save(str(actor / "rollouts" / "tokenizer.json"))
    script = ROOT / "examples" / "pictures.py"
    subprocess.run([sys.executable, script, actor.parent, "--target", target], check=True)
    pictures = {path.name: path.read_bytes()[:4] for path in target.iterdir()}
    assert pictures == dict.fromkeys(["quickstart.png", "sample.png", "watch.png"], b"\x89PNG")
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/watching.md")]
    assert all(f"images/{name}" in "".join(pages) for name in pictures)
