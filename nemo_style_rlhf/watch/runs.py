"""Finds runs below the folders that the user gave, and those that appear there later."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from nemo_style_rlhf.errors import UserError

DEPTH = 4
"""Levels below a given folder at which a run may lie."""
MARKS = ("metrics.jsonl", "config.yaml", "results.jsonl")
"""A folder with one of these files is a run: of training, of a server, of an evaluation."""
NO_RUNS = {
    "checkpoints",
    "configs",
    "data",
    "export",
    "export_adapter",
    "export_critic",
    "logs",
    "rollouts",
    "tensorboard",
    "wandb",
}
"""A run's own folders; these are not searched for runs."""


class UnknownRun(UserError):
    """A request names a run that does not exist, or no longer does."""


@dataclass(frozen=True)
class Run:
    """One run's folder."""

    id: str
    """Its path from the given folder on, printable; unique among the runs of this page."""
    folder: Path


class Runs:
    """The runs below ``roots``; every look finds what is there now."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Find the runs' folders; raises UserError if a root does not exist, or none is a folder."""
        for root in roots:
            if not root.exists():
                raise UserError(
                    f"{root} does not exist: give folders of runs, or one above them in which runs will appear"
                )
        folders = [Path(os.path.abspath(root)) for root in roots if root.is_dir()]  # without ..
        if not folders:
            raise UserError(f"{roots[0]} is a file: give folders of runs, such as outputs/ppo")
        self._known: dict[str, Run] = {}
        self._roots = dict(zip(_labels(folders), folders, strict=True))

    def all(self) -> list[Run]:
        """The runs, sorted by id."""
        found: dict[Path, Run] = {}
        for label, root in self._roots.items():
            for folder in _folders(root, DEPTH):
                parts = [label, *folder.relative_to(root).parts]
                run = Run("/".join(map(printable, parts)), folder)
                found.setdefault(folder.resolve(), run)
        self._known = {run.id: run for run in found.values()}
        return sorted(found.values(), key=lambda run: run.id)

    def get(self, run_id: str) -> Run:
        """The run with this id; raises UnknownRun if there is none."""
        known = self._known.get(run_id)
        if known is not None and known.folder.is_dir():
            return known
        for run in self.all():
            if run.id == run_id:
                return run
        raise UnknownRun(f"there is no run {printable(run_id)} (any more): look at the list of runs")


def printable(name: str) -> str:
    """``name`` with every character escaped that moves a cursor or text, and bytes that are not text."""
    return "".join(each if each.isprintable() and each != "%" else quote(os.fsencode(each), safe="") for each in name)


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell all of them apart."""
    unique = list(dict.fromkeys(folders))
    for count in range(1, max(len(folder.parts) for folder in unique) + 1):
        labels = ["/".join(folder.parts[-count:]).lstrip("/") for folder in folders]
        if len(set(labels)) == len(unique):
            break
    return labels


def _folders(root: Path, depth: int) -> Iterator[Path]:
    """Folders of runs, ``root`` itself among them. A link below it is not followed: it may lead around in a circle."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:  # gone since it was listed, or not readable
        return
    if any(entry.name in MARKS for entry in entries):
        yield root
    if depth:
        for entry in entries:
            if entry.name not in NO_RUNS and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield from _folders(Path(entry.path), depth - 1)
