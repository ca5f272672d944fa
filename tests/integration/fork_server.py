"""A process that has libraries loaded, and becomes in forks of itself what its standard input asks for.

    python -m tests.integration.fork_server MODULE...

A request is a line of JSON with the parameters of :func:`become` and the file for the exit code; the answer is the pid.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys
import threading
from pathlib import Path


def main() -> None:
    for library in sys.argv[1:]:
        importlib.import_module(library)
    gc.freeze()  # a collection in a fork would go through all of it
    for line in sys.stdin:
        request = json.loads(line)
        exit_code = Path(request.pop("exit_code"))
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            become(**request)
            os.close(writer)
            runpy.run_path(sys.argv[0], run_name="__main__")
            return
        os.close(writer)
        os.read(reader, 1)  # it has a session of its own from here on
        os.close(reader)
        threading.Thread(target=report, args=(pid, exit_code), daemon=True).start()
        print(pid, flush=True)


def become(command: list[str], stdout: str, stderr: str, environment: dict[str, str]) -> None:
    """What ``python COMMAND >> stdout 2>> stderr`` finds in a new session."""
    os.setsid()
    for path, stream in ((os.devnull, sys.stdin), (stdout, sys.stdout), (stderr, sys.stderr)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    os.environ.clear()
    os.environ |= environment
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent.resolve())  # as python sets it for a script
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(" ".join([sys.executable, *command]))  # for whoever looks for orphans


def report(pid: int, exit_code: Path) -> None:
    _, status = os.waitpid(pid, 0)
    beside = exit_code.with_suffix(".tmp")
    beside.write_text(str(os.waitstatus_to_exitcode(status)))
    beside.rename(exit_code)


if __name__ == "__main__":
    main()
