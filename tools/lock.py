"""Resolve requirements/ into requirements/lock/: every package of an environment, with the hashes of its files.

    .venv-lock/bin/python tools/lock.py [--upgrade]

Versions that are in a lock stay while requirements/ allow them; --upgrade moves all of them to the newest allowed. CPU builds
of torch are searched at TORCH_INDEX_URL and in the folders of PIP_FIND_LINKS.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REQUIREMENTS = Path("requirements")
LOCK = REQUIREMENTS / "lock"
CPU, CUDA = "torch-cpu.txt", "torch-cuda.txt"
INPUTS = {
    "actor-cpu": [CPU, "vllm-cpu.txt", "actor.txt"],
    "actor-cuda": [CUDA, "vllm-cuda.txt", "actor.txt"],
    "server-cpu": [CPU, "server.txt"],
    "server-cuda": [CUDA, "server.txt"],
    "build-cpu": [CPU, "build.txt"],
    "build-cuda": [CUDA, "build.txt"],
    "dev": ["dev.txt"],
}
"""Requirement files, by lock."""
WITHIN = {
    "build-cpu": ["actor-cpu", "server-cpu"],
    "build-cuda": ["actor-cuda", "server-cuda"],
    "dev": ["actor-cpu", "actor-cuda"],
}
"""Locks, by the lock that is installed into the same environment and so must have their versions."""
PLATFORM = ["--python-platform=x86_64-manylinux_2_35", "--python-version=3.11"]
"""The oldest Python and C library: newer ones install the same versions."""
ENTRY = re.compile(r"^(\S+==\S+)((?: \\\n    --hash=\S+)+)", re.MULTILINE)


def cpu_builds() -> list[str]:
    """Options of uv that name where CPU builds of torch are."""
    indexes, folders = (os.environ.get(name, "").split() for name in ("TORCH_INDEX_URL", "PIP_FIND_LINKS"))
    return [*(f"--index={each}" for each in indexes), *(f"--find-links={each}" for each in folders)]


def hashes(text: str) -> dict[str, set[str]]:
    """The hashes in a lock, by requirement."""
    return {entry[1]: set(re.findall(r"--hash=(\S+)", entry[2])) for entry in ENTRY.finditer(text)}


def with_known(text: str, known: Mapping[str, set[str]]) -> str:
    """The lock, with the hashes that the one before it had for the same versions: an index may serve only some wheels."""

    def merged(entry: re.Match[str]) -> str:
        digests = hashes(entry[0])[entry[1]] | known.get(entry[1], set())
        return entry[1] + "".join(f" \\\n    --hash={digest}" for digest in sorted(digests))

    return ENTRY.sub(merged, text)


def lock(name: str, upgrade: bool) -> None:
    path = LOCK / f"{name}.txt"
    known = hashes(path.read_text()) if path.exists() else {}
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", *PLATFORM, "--no-header"]
    command += ["--generate-hashes", "--annotation-style=line", "--index-strategy=unsafe-best-match"]
    command += [f"--output-file={path}", *(str(REQUIREMENTS / each) for each in INPUTS[name])]
    command += [f"--constraints={LOCK / each}.txt" for each in WITHIN.get(name, [])]
    if CPU in INPUTS[name]:
        command += [f"--excludes={REQUIREMENTS / 'no-cpu-build.txt'}", *cpu_builds()]
    index = {"UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in os.environ else {}
    subprocess.run([*command, *(["--upgrade"] if upgrade else [])], env={**os.environ, **index}, check=True)
    path.write_text(f"# Built by `make lock`.\n{with_known(path.read_text(), known)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="move versions to the newest that requirements/ allow")
    arguments = parser.parse_args()
    for each in INPUTS:
        lock(each, arguments.upgrade)
