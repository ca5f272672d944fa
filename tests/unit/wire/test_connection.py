"""The client's end of a connection."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.wire import connection
from nemo_style_rlhf.wire.connection import Connection
from nemo_style_rlhf.wire.messages import ProtocolError


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_stands_in_brackets(host: str) -> None:
    assert Connection(host, 5567, token=None, retries=0).address == "[::1]:5567"


def test_a_body_may_take_longer_to_send_than_a_connection_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(1)
            size = len(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps({"error": f"[conflict] {size} bytes"}).encode()
            self.send_response(409)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.1)
    tokens = np.zeros(2**22, dtype=np.int32)  # more than both ends of a socket hold
    with HTTPServer(("127.0.0.1", 0), Slow) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        threading.Thread(target=server.handle_request, daemon=True).start()
        client = Connection("127.0.0.1", server.server_port, token=None, retries=0)
        with pytest.raises(ProtocolError, match=r"conflict.* 16\d{6} bytes"):
            client.call(protocol.INFER, protocol.infer_tensors([tokens], protocol.Wanted("both")), timeout_s=30)
        client.close()
