"""A front door before a backend that is not Triton: the door knows of endpoints only what its server tells it."""

import asyncio
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.critic import ServerConfig, ServerTlsConfig
from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig
from nemo_style_rlhf.wire import front_door
from nemo_style_rlhf.wire.connection import Connection, ServerUnreachable
from nemo_style_rlhf.wire.front_door import FrontDoor, FrontDoorSettings, Route
from nemo_style_rlhf.wire.kserve import HEAD_LENGTH_HEADER
from nemo_style_rlhf.wire.listening import Address, FrontDoorProcess, take_address, take_port
from nemo_style_rlhf.wire.messages import BOOT_HEADER, REQUEST, RESPONSE, Endpoint, ProtocolError, TensorSpec
from tests.support.certificates import certificate
from tests.support.strangers import crowd

X = TensorSpec("x", "INT32")
ECHO = Endpoint("echo", (X,), (X,))
TOKEN = "a-shared-secret"
LARGEST = 4096 + 64 * 2**10
"""Bytes of a body: the tensors and their head."""


class Echo(BaseHTTPRequestHandler):
    """Answers with the tensors of the request, and notes the boot ids that it is given."""

    protocol_version = "HTTP/1.1"
    boot_ids: list[str | None]

    def do_POST(self) -> None:
        self.boot_ids.append(self.headers[BOOT_HEADER])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        size = int(self.headers[HEAD_LENGTH_HEADER])
        head = json.dumps({"outputs": json.loads(body[:size])["inputs"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(head) + len(body) - size))
        self.send_header(HEAD_LENGTH_HEADER, str(len(head)))
        self.end_headers()
        self.wfile.write(head + body[size:])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def opened(folder: Path, tls: ServerTlsConfig | None = None) -> Iterator[FrontDoorProcess]:
    Echo.boot_ids = []
    with socketserver.ThreadingUnixStreamServer(str(folder / "backend.sock"), Echo) as backend:
        threading.Thread(target=backend.serve_forever, daemon=True).start()
        door = FrontDoorProcess(
            ServerConfig(port=0, tls=tls or ServerTlsConfig()), Address(take_port("127.0.0.1", 0), TOKEN),
            backend=folder / "backend.sock", metrics=None, routes=[Route(ECHO, 4096)], bytes_in_flight=LARGEST,
        )  # fmt: skip
        try:
            yield door
        finally:  # or the backend would wait for the door's connections
            door.close(10.0)
            backend.shutdown()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[FrontDoorProcess]:
    with opened(tmp_path) as door:
        yield door


def connection(door: FrontDoorProcess, token: str = TOKEN, tls: ClientTlsConfig | None = None) -> Connection:
    return Connection("127.0.0.1", door.port, token=token, retries=0, tls=tls or ClientTlsConfig())


def test_requests_reach_the_backend_within_the_limits_of_their_endpoint(door: FrontDoorProcess) -> None:
    sent = {"x": np.arange(1000, dtype=np.int32)}
    np.testing.assert_array_equal(connection(door).call(ECHO, sent, timeout_s=10)["x"], sent["x"])
    with pytest.raises(ProtocolError, match=rf"expected at most {LARGEST}: split"):
        connection(door).call(ECHO, {"x": np.zeros(LARGEST // 4 + 1, dtype=np.int32)}, timeout_s=10)
    with pytest.raises(ProtocolError, match="no such endpoint"):
        connection(door).call(replace(ECHO, name="critic_status"), sent, timeout_s=10)
    with pytest.raises(UserError, match="refused the token"):
        connection(door, "wrong").call(ECHO, sent, timeout_s=10)
    assert door.alive
    door.close(10.0)
    assert not door.alive
    with pytest.raises(ServerUnreachable):
        connection(door).call(ECHO, sent, timeout_s=10)


def test_strangers_hold_no_client_up_and_fill_no_log(door: FrontDoorProcess, capfd: pytest.CaptureFixture[str]) -> None:
    sent = {"x": np.zeros(1, dtype=np.int32)}
    crowd(door.port, door._process.pid, lambda: connection(door).call(ECHO, sent, timeout_s=10))
    assert len(capfd.readouterr().err) < 1000


def test_the_boot_id_goes_to_endpoints_that_require_it(door: FrontDoorProcess) -> None:
    client = connection(door)
    client.boot_id = "b007"
    for endpoint in (ECHO, replace(ECHO, requires_boot=False)):
        client.call(endpoint, {"x": np.zeros(1, dtype=np.int32)}, timeout_s=10)
    assert Echo.boot_ids == ["b007", None]


def test_a_door_with_a_client_ca_wants_a_certificate_of_it(tmp_path: Path) -> None:
    server, client, other = (str(certificate(tmp_path, name)) for name in ("server", "client", "other"))
    sent = {"x": np.zeros(1, dtype=np.int32)}

    def call(**own: str) -> None:
        connection(door, tls=ClientTlsConfig(ca=server, **own)).call(ECHO, sent, timeout_s=10)

    with opened(tmp_path, ServerTlsConfig(server, str(tmp_path / "server.key"), client_ca=client)) as door:
        call(certificate=client, key=str(tmp_path / "client.key"))
        for own in ({}, {"certificate": other, "key": str(tmp_path / "other.key")}):
            with pytest.raises(UserError, match=r"certificate|unknown ca"):
                call(**own)
    assert len(Echo.boot_ids) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_no_address_but_loopback_opens_without_a_token(host: str) -> None:
    with pytest.raises(UserError, match=f"server.host={host} would open the server to the network without a token"):
        take_address(ServerConfig(host=host, port=0))


def test_settings_survive_their_way_to_the_door() -> None:
    routes = (
        Route(ECHO, 4096),
        Route(Endpoint("ask", (REQUEST,), (RESPONSE,), roles=("critic",), requires_boot=False), 0),
    )
    settings = FrontDoorSettings(3, TOKEN, "/backend.sock", None, routes, 2**20, certificate="server.pem")
    assert FrontDoorSettings.from_json(settings.to_json()) == settings
    assert [route.largest_body for route in routes] == [LARGEST, 2**20]


def test_connections_to_the_backend_are_kept_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a peak of calls has left."""
    monkeypatch.setattr(front_door, "REST_S", 0.2)
    path, route = str(tmp_path / "backend.sock"), Route(ECHO, 4096)

    async def peak() -> None:
        async with await asyncio.start_unix_server(lambda *_: asyncio.Event().wait(), path):
            door = FrontDoor(FrontDoorSettings(3, TOKEN, path, None, (route,), 2**20))
            streams = [await door.to_backend(route) for _ in range(20)]
            for stream in streams:
                door.rest(route, stream)
            again = [await door.to_backend(route) for _ in range(5)]
            assert {*again} < {*streams}
            await asyncio.sleep(0.4)
            assert {stream for stream in streams if not stream.closed()} == {*again}
            for stream in again:
                stream.close()

    asyncio.run(peak())
