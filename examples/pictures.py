"""The pictures of README and docs/watching.md, made from a finished quickstart:

    .venv-actor/bin/python examples/pictures.py outputs/quickstart

They go to docs/images, or to the folder of --target. The Chromium of the tests (`make dev` installs it) renders the page.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from curves import plot_curves, read_metrics

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.support.browser import Browser
from tests.support.paths import ROOT
from tests.support.watching import watching


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("quickstart", type=Path, help="the folder that examples/quickstart/run.py wrote")
    parser.add_argument("--target", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    rows = read_metrics(arguments.quickstart / "actor" / "metrics.jsonl")
    plot_curves({"": [rows]}, arguments.target / "quickstart.png", title="Quickstart: PPO")
    look(arguments.quickstart, arguments.target, last_step=int(rows[-1]["step"]))


def look(quickstart: Path, target: Path, *, last_step: int) -> None:
    """Take pictures of the page of runs and of a sample of the last step."""
    run = f"{quickstart.resolve().name}/actor"
    with TemporaryDirectory() as profile, Browser(Path(profile)) as browser, watching(quickstart) as link:
        browser.resize(1280, 720)
        browser.open(link)
        browser.wait("document.querySelectorAll('.chart canvas').length > 5")
        browser.screenshot(target / "watch.png")
        browser.resize(1280, 620)
        browser.run(f"location.hash = '#/sample?run={run}&step={last_step}&row=0'")
        browser.wait("document.querySelectorAll('.token').length > 0")
        browser.press("ArrowRight")
        browser.screenshot(target / "sample.png")


if __name__ == "__main__":
    main()
