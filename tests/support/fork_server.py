"""A process that has loaded libraries, and forks itself to run the scripts that its standard input names.

    python -m tests.support.fork_server MODULE...

A request is a line of JSON with the parameters of :func:`become`, the number of ranks and the file for the exit code; the answer
is the pid.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

GRACE_S = 30
"""Seconds from SIGTERM to SIGKILL."""
NOTICE_S = 0.5
"""Seconds until a rank's failure is noticed, as torchrun, too, only looks from time to time: the others can still say why."""


def main() -> None:
    for library in sys.argv[1:]:
        importlib.import_module(library)
    gc.freeze()  # a collection in a fork would go through all of it
    gc.unfreeze = lambda: None  # vLLM asks for that when it ends
    for line in sys.stdin:
        request = json.loads(line)
        ranks, exit_code = request.pop("ranks"), Path(request.pop("exit_code"))
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            become(**request)
            os.close(writer)
            if ranks > 1:
                become_ranks(ranks)
            run_to_the_end()
        os.close(writer)
        os.read(reader, 1)  # the fork has its own session from here on
        os.close(reader)
        threading.Thread(target=report, args=(pid, exit_code), daemon=True).start()
        print(pid, flush=True)
    os._exit(0)


def become(command: list[str], stdout: str, stderr: str, environment: dict[str, str]) -> None:
    """Set up this process like ``python COMMAND >> stdout 2>> stderr`` in a new session."""
    os.setsid()
    for path, stream in ((os.devnull, sys.stdin), (stdout, sys.stdout), (stderr, sys.stderr)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    os.environ.clear()
    os.environ |= environment
    time.tzset()  # TZ may be another
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent.resolve())  # as python sets it for a script
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(" ".join([sys.executable, *command]))  # for tests that look for orphans


def become_ranks(count: int) -> None:
    """Fork ``count`` ranks, and return in each. This process acts as their torchrun: if a rank fails, or SIGTERM arrives, it
    sends SIGTERM to all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ranks: list[int] = []
    for rank in range(count):
        if (pid := os.fork()) == 0:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ |= {name: str(value) for name, value in {**numbers, "MASTER_PORT": port}.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            return
        ranks.append(pid)

    def send(number: int) -> None:
        for pid in ranks:
            os.kill(pid, number)

    def end_them(*_: object) -> None:
        send(signal.SIGTERM)
        signal.alarm(GRACE_S)

    signal.signal(signal.SIGTERM, end_them)
    signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not failed:
            failed = True
            time.sleep(NOTICE_S)
            end_them()
    os._exit(failed)


def run_to_the_end() -> NoReturn:
    """End the interpreter without its last collections, which would go through all memory that the forks share."""
    code: object = None
    if "NSR_RECORD_OPERATORS" in os.environ:
        from tests.support import operators

        operators.record()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 as any of it ends a script
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def report(pid: int, exit_code: Path) -> None:
    _, status = os.waitpid(pid, 0)
    beside = exit_code.with_suffix(".tmp")
    beside.write_text(str(os.waitstatus_to_exitcode(status)))
    beside.rename(exit_code)


if __name__ == "__main__":
    main()
