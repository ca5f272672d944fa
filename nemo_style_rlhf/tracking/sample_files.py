"""Finds the files with the samples of a run; rollout_files.py describes their content. Standard library only."""

import re
from pathlib import Path
from typing import NamedTuple

NAME = re.compile(r"step_(\d{1,12})\.parquet|steps_(\d{1,12})_(\d{1,12})\.parquet")


class SampleFile(NamedTuple):
    first: int
    """Its first step."""
    last: int
    path: Path


def sample_files(folder: Path) -> list[SampleFile]:
    """The files that together hold every recorded step once, by step; none for a folder that does not exist."""
    found = []
    for path in folder.glob("step*.parquet"):
        if (match := NAME.fullmatch(path.name)) and path.is_file():
            first, last = match[1] or match[2], match[1] or match[3]
            found.append(SampleFile(int(first), int(last), path))
    merged = [file for file in found if file.path.name.startswith("steps_")]
    return sorted(file for file in found if file in merged or not any(m.first <= file.first <= m.last for m in merged))
