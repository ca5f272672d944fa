"""Ports for processes that listen only once they have loaded. Standard library only."""

import random
import socket

PORTS = range(20_000, 32_768)
"""Linux gives ports from 32768 up to connections and to processes that ask for any port: one may be gone seconds later."""


def free_ports(count: int) -> list[int]:
    """``count`` ports of this node on which no process listens.

    Raises:
        OSError: there are not as many.
    """
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        try:
            with socket.create_server(("", port)):
                found.append(port)
        except OSError:
            continue
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports from {PORTS.start} to {PORTS.stop - 1}")
