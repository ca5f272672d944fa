"""TLS and mutual TLS between client and front door."""

import re
import socket
import ssl
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nemo_style_rlhf.critic_service.remote_critic import RemoteCritic
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig
from tests.support.certificates import certificate
from tests.support.critic_server import CriticServer, sequences, train_batch


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client", "other"):
        certificate(folder, name)
    certificate(folder, "elsewhere", host="DNS:elsewhere.example.org")
    return folder


def break_a_record(server: CriticServer) -> None:
    """Send a request that is refused before its body is read, and bytes that are not encrypted after the start of the body."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tls = context.wrap_bio(incoming, outgoing)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as link:
        for _ in range(10):
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                link.sendall(outgoing.read())
                incoming.write(link.recv(65536))
        tls.write(
            b"POST /v2/models/critic_infer/infer HTTP/1.1\r\nHost: critic\r\nContent-Length: 100\r\n\r\nthe start"
        )
        link.sendall(outgoing.read() + b"not encrypted" * 8)
        with suppress(ConnectionResetError):
            while link.recv(65536):  # until the server ends the connection
                pass


def hang_up_before_the_handshake(server: CriticServer) -> None:
    """Send bytes and reset the connection before the door, which is stopped meanwhile, has accepted it."""
    (door,) = [process for process in server.processes() if any("front_door" in word for word in process.cmdline())]
    door.suspend()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.sendall(b"no handshake")
    door.resume()


def test_tls_and_mutual_tls(certificates: Path, tmp_path: Path, reward_model: Path, backend: str) -> None:
    """Every call goes through; wrong certificates on either side are one sentence, at once."""

    def tls(**names: str) -> ClientTlsConfig:
        return ClientTlsConfig(**{key: str(certificates / name) for key, name in names.items()})

    def refusal(server: CriticServer, config: ClientTlsConfig) -> str:
        started = time.monotonic()
        with RemoteCritic(server.config(tls=config)) as client, pytest.raises(UserError) as refused:
            client.status()
        assert time.monotonic() - started < 20
        return str(refused.value)

    mine = {"certificate": "client.crt", "key": "client.key"}
    keys = [f"server.tls.certificate={certificates}/server.crt", f"server.tls.key={certificates}/server.key"]
    authority = f"server.tls.client_ca={certificates}/client.crt"
    server = CriticServer(tmp_path / "mutual", reward_model, [*keys, authority], backend=backend).start()
    try:
        assert f"https://127.0.0.1:{server.port}" in server.log.read_text()
        with server.client(tls=tls(ca="server.crt", **mine)) as critic:
            assert len(critic.infer(sequences(1)).result().values) == 7
            assert critic.train(train_batch(1), step=1).result()["optimizer_steps"] == 2
        assert "certificate verify failed" in refusal(server, tls(ca="other.crt", **mine))
        assert re.search("certificate required|another certificate of yours", refusal(server, tls(ca="server.crt")))
        other = {"certificate": "other.crt", "key": "other.key"}
        assert re.search("unknown ca|another certificate of yours", refusal(server, tls(ca="server.crt", **other)))
        assert "it speaks TLS, this process plain HTTP" in refusal(server, ClientTlsConfig())
    finally:
        server.close()
    keys = [f"server.tls.certificate={certificates}/elsewhere.crt", f"server.tls.key={certificates}/elsewhere.key"]
    server = CriticServer(tmp_path / "elsewhere", reward_model, keys, backend=backend).start()
    try:
        assert "IP address mismatch" in refusal(server, tls(ca="elsewhere.crt"))
        break_a_record(server)
        hang_up_before_the_handshake(server)
        assert "IP address mismatch" in refusal(server, tls(ca="elsewhere.crt"))
        assert "Traceback" not in server.log.read_text()
    finally:
        server.close()


@pytest.mark.more
def test_a_client_with_tls_and_a_server_without_is_one_sentence(
    shared_server: CriticServer, certificates: Path
) -> None:
    config = shared_server.config(tls=ClientTlsConfig(ca=str(certificates / "server.crt")))
    with RemoteCritic(config) as client, pytest.raises(UserError, match=r"no TLS with the critic server"):
        client.status()


def test_certificates_that_do_not_load_are_one_sentence(make_server, certificates: Path) -> None:
    server = make_server(
        f"server.tls.certificate={certificates}/server.crt", f"server.tls.key={certificates}/client.key"
    )
    refused = subprocess.run(server.command(), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "server.tls does not load" in refused.stderr and "Traceback" not in refused.stderr
