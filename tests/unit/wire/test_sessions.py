"""Nobody waits for the answers of calls that are ended."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig
from nemo_style_rlhf.wire.connection import Connection, ServerUnreachable
from nemo_style_rlhf.wire.front_door import tls_context
from nemo_style_rlhf.wire.sessions import Sessions
from tests.support.certificates import certificate

SOON_S = 5.0


class Silent:
    """Accepts connections and answers nothing."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.heard = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._tls = tls
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        link, _ = self._listener.accept()
        link = link if self._tls is None else self._tls.wrap_socket(link, server_side=True)
        while link.recv(2**16):
            self.heard.set()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_call_under_way_ends_with_its_connection(encrypted: bool, tmp_path: Path) -> None:
    tls = ClientTlsConfig(ca=str(certificate(tmp_path, "server"))) if encrypted else ClientTlsConfig()
    server = Silent(tls_context(tls.ca, str(tmp_path / "server.key"), None) if tls.ca else None)
    client = Connection("127.0.0.1", server.port, token=None, retries=9, tls=tls)
    client.boot_id = "b007"
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, protocol.STATUS, {}, timeout_s=60)
        assert server.heard.wait(10)
        ended = time.monotonic()
        client.close()
        with pytest.raises(ServerUnreachable):
            call.result(60)
        assert time.monotonic() - ended < SOON_S
    server.close()


def test_no_call_begins_afterwards(silent: Silent) -> None:
    sessions = Sessions()
    session = sessions.new()
    sessions.close()
    with pytest.raises(requests.ConnectionError):
        session.post(f"http://127.0.0.1:{silent.port}/", data=b"x", timeout=60)


def test_a_call_through_a_proxy_ends_too(silent: Silent) -> None:
    sessions = Sessions()
    proxies = {"http": f"http://127.0.0.1:{silent.port}"}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sessions.new().post, "http://judge.example/", proxies=proxies, timeout=60)
        assert silent.heard.wait(10)
        sessions.close()
        with pytest.raises(requests.ConnectionError):
            call.result(SOON_S)
