"""Ports for processes that listen only once they have loaded. Standard library only."""

import random
import socket

PORTS = range(20_000, 32_768)
"""Linux gives connections, and whoever asks for any port, ports from 32768 up: one of those may be gone seconds later."""


def free_ports(count: int) -> list[int]:
    """``count`` ports of this node that nobody listens on.

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
