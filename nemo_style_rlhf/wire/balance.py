"""Balances requests over several equal servers."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

Server = TypeVar("Server")
FIRST_RETRY_S = 0.5
LONGEST_RETRY_WAIT_S = 10.0


@dataclass
class _Place(Generic[Server]):
    server: Server
    running: int = 0
    """Number of requests under way."""
    asked_at: float = 0.0
    """time.monotonic() of the last request."""
    resting_until: float = 0.0
    """time.monotonic() until which the server is asked only if all others rest, too."""


class LeastBusy(Generic[Server]):
    """Sends each request to the healthy server with the fewest requests under way, and among equals to the one asked longest
    ago. A server that fails rests for a while. Thread-safe."""

    def __init__(self, servers: Sequence[Server], *, rest_s: float, first: int) -> None:
        """``first`` is the index of the server to ask first, modulo their number. Ranks balance independently, so they give
        different indices."""
        first %= len(servers)
        self._places = [_Place(server) for server in (*servers[first:], *servers[:first])]
        self._rest_s = rest_s
        self._lock = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[Server]:
        """The server for one request; an exception within the context counts as a failure of the server."""
        place = self._chosen()
        try:
            yield place.server
            place.resting_until = 0.0
        except Exception:
            place.resting_until = time.monotonic() + self._rest_s
            raise
        finally:
            with self._lock:
                place.running -= 1

    def attempts(self, count: int, closing: threading.Event) -> Iterator[int]:
        """Number the attempts at one request. If all servers rest, wait before the next attempt, longer each time, unless
        ``closing`` is set."""
        wait_s = FIRST_RETRY_S
        for attempt in range(count):
            if attempt > 0 and self._all_rest:
                closing.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_WAIT_S)
            yield attempt

    @property
    def _all_rest(self) -> bool:
        with self._lock:
            return all(place.resting_until > time.monotonic() for place in self._places)

    def _chosen(self) -> _Place[Server]:
        """If all servers rest, choose the one whose rest ends first."""
        with self._lock:
            now = time.monotonic()
            healthy = [place for place in self._places if place.resting_until <= now]
            if healthy:
                chosen = min(healthy, key=lambda place: (place.running, place.asked_at))
            else:
                chosen = min(self._places, key=lambda place: place.resting_until)
            chosen.running += 1
            chosen.asked_at = now
            return chosen
