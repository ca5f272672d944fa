"""The README's pictures come from a finished quickstart."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def test_the_curves_are_drawn_from_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    rows = [{"step": k, "train_rollouts/rewards": k, "train_rollouts/init_policy_kl": 0.1 * k} for k in range(1, 4)]
    (tmp_path / "actor" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = ROOT / "examples" / "pictures.py"
    subprocess.run([sys.executable, script, tmp_path, "--target", tmp_path], check=True)
    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert "docs/images/quickstart.png" in (ROOT / "README.md").read_text()
