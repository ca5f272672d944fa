"""How fast are the page's views over the rollouts of a long run, and how much memory does the server take?

    .venv-actor/bin/python benchmarks/watch.py

Synthesizes a run of 1,000 steps x 512 samples x 512 tokens (about 14 GB below --folder; an existing run there is used again),
starts trainers/watch.py, and measures each view's request: cold, by a server that was just started and files that are not in
the page cache where the system lets us drop them from it; and warm, the median of several.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from large_rollouts import Size, write_run
from report import table

ROOT = Path(__file__).parents[1]
RUN = "large"
REPEATS = 3


class Server:
    """trainers/watch.py on the folder."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(ROOT / "trainers" / "watch.py"), str(folder), "--port=0"]
        started = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        link = self._process.stdout.readline().split()[1]
        self.start_s = time.perf_counter() - started
        self._base, _, self._token = link.partition("?token=")

    def get(self, path: str, **params: object) -> tuple[float, bytes]:
        """Seconds and body of a request."""
        request = urllib.request.Request(
            f"{self._base}api/{path}?{urlencode(params, doseq=True)}",
            headers={"Authorization": f"Bearer {self._token}"},
        )
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            body = answer.read()
        return time.perf_counter() - started, body

    def first_line(self, path: str, **params: object) -> float:
        """Seconds until the first hit of a search, which is then given up."""
        request = urllib.request.Request(
            f"{self._base}api/{path}?{urlencode(params)}", headers={"Authorization": f"Bearer {self._token}"}
        )
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if b'"row"' in line:
                    return time.perf_counter() - started
        raise RuntimeError("nothing found")

    def cpu_s(self) -> float:
        """Processor seconds so far, which other programs on this machine do not add to."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_gib(self) -> tuple[float, float]:
        """Now, and at its peak."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        now, peak = (int(fields[name].split()[0]) / 2**20 for name in ("VmRSS", "VmHWM"))
        return now, peak

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    running = Server(folder)
    try:
        yield running
    finally:
        running.close()


def views(folder: Path, size: Size) -> dict[str, tuple[str, dict[str, Any]]]:
    """The first request of each view."""
    run = {"run": f"{folder.name}/{RUN}"}
    middle = size.steps // 2
    prompt_id = (middle * size.samples // size.samples_per_prompt) % size.prompts
    return {
        "newest samples": ("rollouts", run),
        "worst KL": ("rollouts", {**run, "sort": "kl_max"}),
        "highest reward": ("rollouts", {**run, "sort": "reward"}),
        "failed": ("rollouts", {**run, "filter": "failed:eq:true"}),
        "truncated": ("rollouts", {**run, "filter": "finish_reason:eq:length"}),
        "last page of a sort": ("rollouts", {**run, "sort": "kl_mean", "offset": size.steps * size.samples - 50}),
        "groups by spread": ("rollouts", {**run, "by": "group", "sort": "reward_spread"}),
        "prompts by change": ("rollouts", {**run, "by": "prompt", "sort": "reward_change"}),
        "a prompt over the steps": ("prompt", {**run, "prompt_id": 0, "limit": 5}),
        "a sample with its tokens": ("sample", {**run, "step": middle, "row": 7}),
        "its group": ("group", {**run, "step": middle, "prompt_id": prompt_id}),
        "two steps side by side": ("compare", {"run": [run["run"]] * 2, "step": [size.steps, max(size.steps - 100, 1)]}),
    }  # fmt: skip


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*.parquet"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, size: Size) -> list[list[str]]:
    rows = []
    for name, (path, params) in views(folder, size).items():
        forget(folder)
        with server(folder) as started:
            cold, body = started.get(path, **params)
            answer = json.loads(body)
            read = f"{answer['files_read']} of {answer['files']} files" if "files" in answer else ""
            complete = time.perf_counter()
            while "files" in answer and answer["files_read"] < answer["files"]:
                answer = json.loads(started.get(path, **params)[1])
            waited = cold + time.perf_counter() - complete
            started.get("rollouts", **{"run": f"{folder.name}/{RUN}"})
            before = started.cpu_s()
            warm = [started.get(path, **params)[0] for _ in range(REPEATS)]
            cpu_s = (started.cpu_s() - before) / REPEATS
            rows.append(
                [
                    name,
                    f"{cold:.2f}",
                    read,
                    f"{waited:.2f}",
                    f"{statistics.median(warm):.3f}",
                    f"{cpu_s:.3f}",
                    f"{started.memory_gib()[1]:.2f}",
                ]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def measure_search(folder: Path, size: Size) -> list[list[str]]:
    """A word that every sample has, one that none has, and views while that search runs."""
    run = {"run": f"{folder.name}/{RUN}"}
    forget(folder)
    with server(folder) as started:
        started.get("rollouts", **run)
        first = started.first_line("search", **run, q="bafi")
        seconds, _ = started.get("search", **run, q="no text has this")
        thread = subprocess.Popen(
            [sys.executable, "-c", SEARCH, started._base, started._token, urlencode({**run, "q": "nor this"})]
        )
        time.sleep(0.5)
        beside = [started.get(path, **params)[0] for path, params in list(views(folder, size).values())[:8]]
        thread.kill()
        thread.wait()
        _, peak = started.memory_gib()
    return [
        ["first hit of a frequent word", f"{first:.2f}"],
        ["all texts, without a hit", f"{seconds:.1f}"],
        ["slowest of eight views beside a search", f"{max(beside):.2f}"],
        ["peak memory of the server, GiB", f"{peak:.2f}"],
    ]


SEARCH = """
import sys, urllib.request
base, token, query = sys.argv[1:]
request = urllib.request.Request(f"{base}api/search?{query}", headers={"Authorization": f"Bearer {token}"})
urllib.request.urlopen(request).read()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "watch_benchmark")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    size = Size(arguments.steps, arguments.samples, arguments.tokens)
    run = arguments.folder / RUN
    if not run.exists():
        write_run(run, size)
    gigabytes = sum(path.stat().st_size for path in run.rglob("*.parquet")) / 1e9
    with server(arguments.folder) as started:
        start_s = started.start_s
    heads = [
        "view",
        "cold, seconds",
        "of which it knew",
        "all files read, seconds",
        "warm, seconds",
        "peak memory, GiB",
    ]
    print(
        f"{size.steps:,} steps x {size.samples} samples x {size.tokens} tokens, {gigabytes:.1f} GB; starts in {start_s:.2f} s\n"
    )
    print(table(heads, measure(arguments.folder, size)))
    print()
    print(table(["search", ""], measure_search(arguments.folder, size)))


if __name__ == "__main__":
    main()
