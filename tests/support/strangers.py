"""What strangers do to a server that listens."""

import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

HEAD_S = 10.0
"""Seconds in which a head must arrive, as docs/protocol.md states it."""
CROWD, FILES = 1500, 1024
"""Connections, and files that a process may open in a shell as it comes."""
FLOODS = (
    b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 2**20,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n" + b"x" * 2**22,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 2**20,
)


def crowd(port: int, pid: int, ask: Callable[[], object]) -> None:
    """Have 1,500 connections of this host be silent or send their heads slowly, beside some that send far too much. ``ask`` must
    be answered all the while, and every connection ended in time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, hard))
    with ExitStack() as opened:
        links = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(CROWD)]
        began = time.monotonic()
        while time.monotonic() < began + HEAD_S + 2:
            asked = time.monotonic()
            ask()
            assert time.monotonic() - asked < 5
            for link in links[::2]:
                with suppress(OSError):
                    link.send(b"X")
            for flood in FLOODS:
                with socket.create_connection(("127.0.0.1", port), timeout=0.5) as link, suppress(OSError):
                    link.sendall(flood)
            time.sleep(0.5)
        for link in links:
            link.settimeout(1)
            with suppress(ConnectionError):
                while link.recv(4096):
                    pass
