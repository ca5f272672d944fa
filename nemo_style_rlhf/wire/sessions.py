"""Sessions of `requests` whose calls another thread can end, however long their answers take."""

import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import PoolManager


class Sessions:
    """Makes sessions, and ends their calls. Thread-safe."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def new(self) -> requests.Session:
        session = requests.Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter(self._opened))
        return session

    def close(self) -> None:
        """Make every call of these sessions, under way or to come, raise requests.ConnectionError."""
        with self._lock:
            self._closed = True
            for each in self._sockets:
                _end(each)

    def _opened(self, connected: socket.socket) -> None:
        with self._lock:
            self._sockets.add(connected)
            if self._closed:
                _end(connected)


def _end(connected: socket.socket) -> None:
    with suppress(OSError):  # the other side has ended it
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # an SSLSocket's own would take TLS from under its reader


class _Adapter(HTTPAdapter):
    """Reports each socket that is connected."""

    def __init__(self, opened: Callable[[socket.socket], None]) -> None:
        self._opened = opened
        super().__init__()

    def init_poolmanager(self, *given: Any, **named: Any) -> None:
        super().init_poolmanager(*given, **named)
        self._watch(self.poolmanager)

    def proxy_manager_for(self, *given: Any, **named: Any) -> PoolManager:
        manager: PoolManager = super().proxy_manager_for(*given, **named)
        self._watch(manager)
        return manager

    def _watch(self, manager: PoolManager) -> None:
        kinds: dict[str, Any] = manager.pool_classes_by_scheme
        manager.pool_classes_by_scheme = {
            scheme: type(pool.__name__, (pool,), {"ConnectionCls": self._telling(pool.ConnectionCls)})
            for scheme, pool in kinds.items()
        }

    def _telling(self, kind: Any) -> Any:
        opened = self._opened

        class Telling(kind):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                opened(self.sock)

        return Telling
