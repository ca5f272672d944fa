"""Requests to a server: sessions per thread, finite timeouts, bounded retries, errors that name the address and the cause."""

import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping

import requests
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential
from tenacity.nap import sleep_using_event
from tenacity.stop import stop_any, stop_when_event_set

from nemo_style_rlhf.errors import StorageError, UserError
from nemo_style_rlhf.schema.remote_critic import SYSTEM, ClientTlsConfig, Peer, RemoteCriticConfig
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.kserve import HEAD_LENGTH_HEADER, decode_response, encode_request
from nemo_style_rlhf.wire.messages import Array, Code, Endpoint, ProtocolError
from nemo_style_rlhf.wire.sessions import Sessions

LOGGER = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 10.0
SLOWEST_LINK = 2**20
"""Bytes per second. urllib3 demands that a body is sent within the timeout of its connection, so the timeout assumes this
rate."""
FIRST_RETRY_S = 0.5
LONGEST_RETRY_WAIT_S = 10.0
PLAIN_HTTP = ClientTlsConfig()
PROXYS_OWN = (502, 503, 504)
"""HTTP statuses of a proxy whose server is away or restarting."""


class ServerRestarted(Exception):
    """A new server process answers: its critic is in the initial state until a checkpoint is restored."""


class LeaseLost(UserError):
    """Another actor acquired the lease: this actor may no longer change the critic."""


class ServerUnreachable(UserError):
    """No answer came after all retries, or the server answered that it ends because of an internal error."""


class ServerAbsent(UserError):
    """No server answered within ``wait_for_server_s``."""


class _NotReady(Exception):
    """A server answers at the address, but the endpoint is not loaded yet, or the server is stopping and no longer serves it."""


_TRANSIENT = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError, _NotReady)
TLS_REFUSAL = re.compile(r"certificate|unknown[ _]ca|wrong[ _]version|mismatch|alert|handshake", re.IGNORECASE)
"""Matches OpenSSL's words for a refusal; every other TLS error is a broken connection."""
PROBE_S = 3.0


class Connection:
    """Calls endpoints at ``host:port``. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        retries: int,
        peer: Peer = RemoteCriticConfig.peer,
        tls: ClientTlsConfig = PLAIN_HTTP,
    ) -> None:
        self.address = f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"
        self.boot_id: str | None = None
        """Id of the server process. Once this is set, another process refuses requests with :class:`ServerRestarted`."""
        self._token = token
        self._peer = peer
        self._tls = tls
        self._retries = retries
        self._closing = threading.Event()
        self._threads = threading.local()
        self._sessions = Sessions()

    def stop_retrying(self) -> None:
        """Do not retry attempts that fail from now on."""
        self._closing.set()

    def close(self) -> None:
        """End the calls under way. They raise ServerUnreachable."""
        self.stop_retrying()
        self._sessions.close()

    def call(
        self, endpoint: Endpoint, inputs: Mapping[str, Array], *, timeout_s: float, retry: bool = True
    ) -> dict[str, Array]:
        """Return the outputs of one request. Requests to every endpoint are safe to repeat, so broken connections and timeouts
        are retried.

        Raises:
            ProtocolError: the server refused the request.
            ServerRestarted, LeaseLost: see these classes.
            ServerUnreachable: ``retries`` times no connection, no answer in time or a stopping server; or the server failed.
            StorageError: the server's disk is full.
            UserError: the token is wrong, or no critic server is at this address.
        """
        body, head_length = encode_request(endpoint, inputs)
        attempts = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, _TRANSIENT) and self._tls_refusal(error) is None),
            stop=stop_any(stop_after_attempt(1 + (self._retries if retry else 0)), stop_when_event_set(self._closing)),
            sleep=sleep_using_event(self._closing),
            wait=wait_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_WAIT_S),
            before_sleep=self._tell,
            reraise=True,
        )
        started = time.monotonic()
        try:
            return attempts(self._post, endpoint, body, head_length, timeout_s)
        except requests.ReadTimeout as error:
            if (reason := self._tls_refusal(error)) is not None:
                raise self._no_tls(reason) from error
            raise ServerUnreachable(
                f"the {self._peer.name} at {self.address} did not answer {endpoint.name} within {timeout_s:.0f} s "
                f"({time.monotonic() - started:.0f} s with retries): look at its log, or raise the timeout in "
                f"{self._peer.section}"
            ) from error
        except _NotReady as error:
            raise ServerUnreachable(str(error)) from error
        except requests.RequestException as error:
            if (reason := self._tls_refusal(error)) is not None:
                raise self._no_tls(reason) from error
            raise ServerUnreachable(
                f"no {self._peer.name} answers at {self.address}: start {self._peer.script} there, "
                f"or correct {self._address_keys}"
            ) from error

    def _post(self, endpoint: Endpoint, body: bytes, head_length: int, timeout_s: float) -> dict[str, Array]:
        headers = {
            HEAD_LENGTH_HEADER: str(head_length),
            "Content-Type": "application/octet-stream",
            "Accept-Encoding": "identity",  # gzip costs ten times the round trip
        }
        if self._token is not None:
            headers[messages.TOKEN_HEADER] = self._token
        if self.boot_id is not None and endpoint.requires_boot:
            headers[messages.BOOT_HEADER] = self.boot_id
        url = f"{'http' if self._tls.ca is None else 'https'}://{self.address}/v2/models/{endpoint.name}/infer"
        connect_s = max(CONNECT_TIMEOUT_S, len(body) / SLOWEST_LINK)
        response = self._session().post(url, data=body, headers=headers, timeout=(connect_s, timeout_s))
        if response.status_code != requests.codes.ok:
            self._raise(endpoint, response)
        return decode_response(response.content, int(response.headers.get(HEAD_LENGTH_HEADER, len(response.content))))

    def _raise(self, endpoint: Endpoint, response: requests.Response) -> None:
        try:
            text = str(response.json()["error"])
        except (ValueError, KeyError, TypeError) as error:
            if response.status_code in PROXYS_OWN:
                raise _NotReady(
                    f"a proxy at {self.address} answers HTTP {response.status_code}: start the {self._peer.name} behind it, or "
                    f"correct {self._address_keys}"
                ) from error
            raise UserError(
                f"what answers at {self.address} is not a {self._peer.name} (HTTP {response.status_code}): "
                f"correct {self._address_keys}"
            ) from error
        refusal = ProtocolError.parse(text)
        if refusal.code is Code.UNAUTHORIZED:
            section = self._peer.section
            raise UserError(
                f"the {self._peer.name} at {self.address} refused the token ({refusal.message}): give this process the same "
                f"secret as the server, in {section}.token.token_file or the environment variable {section}.token.token_env"
            )
        if refusal.code is Code.STORAGE:
            raise StorageError(f"the {self._peer.name} at {self.address}: {refusal.message}")
        if refusal.code is Code.INTERNAL:
            raise ServerUnreachable(f"the {self._peer.name} at {self.address}: {refusal.message}")
        if refusal.code is Code.STOPPING:
            raise _NotReady(f"the {self._peer.name} at {self.address} is stopping: start it again")
        if refusal.code is Code.RESTARTED:
            raise ServerRestarted(f"{self.address}: {refusal.message}")
        if refusal.code is Code.LEASE_LOST:
            raise LeaseLost(
                f"{self.address}: {refusal.message}; this run ends with its last checkpoint whole: stop the other one and start "
                "this one again"
            )
        if (
            refusal.code is Code.INVALID and "is not healthy" in text
        ):  # Triton says so of an endpoint whose process died
            raise _NotReady(f"the {self._peer.name} at {self.address} is ending for a fault of its own: start it again")
        raise ProtocolError(refusal.code, f"{endpoint.name} at {self.address}: {refusal.message}")

    def _tls_refusal(self, error: BaseException) -> str | None:
        """The reason that the two sides cannot speak TLS with each other; None if something else went wrong."""
        text = str(error)
        if self._tls.ca is not None and "SSL" in text and TLS_REFUSAL.search(text):
            return re.sub(r"^.*?\] |\(_ssl\.c.*$", "", text.rpartition("SSL")[2]).strip()
        if self.boot_id is not None:
            return None
        if self._tls.ca is None:
            ended = re.search("RemoteDisconnected|ConnectionReset", text)
            return "it speaks TLS, this process plain HTTP" if ended and self._answers(tls=True) else None
        if "SSL" not in text and "timed out" not in text:
            return None
        if self._answers(tls=False):
            return "it speaks plain HTTP, this process TLS"
        # If this side has already sent its request, the server's refusal shows only as the end of the connection.
        return "it ended the connection, as if it wanted another certificate of yours" if "SSL" in text else None

    def _no_tls(self, reason: str) -> UserError:
        return UserError(
            f"no TLS with the {self._peer.name} at {self.address} ({reason}): give the signer of its certificate, which must "
            f"name this host, in {self._peer.section}.tls.ca, and a certificate of yours where it demands one"
        )

    def _answers(self, *, tls: bool) -> bool:
        """True if the server answers a first message in TLS, or in plain HTTP if ``tls`` is False."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S) as link:
                if tls:
                    context.wrap_socket(link).close()
                    return True
                link.sendall(b"GET / HTTP/1.1\r\nHost: critic\r\n\r\n")
                return link.recv(5) == b"HTTP/"
        except OSError:
            return False

    @property
    def _address_keys(self) -> str:
        return self._peer.address or f"{self._peer.section}.host and {self._peer.section}.port"

    def _session(self) -> requests.Session:
        if not hasattr(self._threads, "session"):
            self._threads.session = self._sessions.new()
            self._threads.session.trust_env = False  # no proxy and no .netrc between the two processes
            self._threads.session.verify = True if self._tls.ca in (None, SYSTEM) else self._tls.ca
            if self._tls.certificate is not None:
                key = self._tls.key
                self._threads.session.cert = (self._tls.certificate, key) if key else self._tls.certificate
        session: requests.Session = self._threads.session
        return session

    def _tell(self, state: RetryCallState) -> None:
        assert state.outcome is not None and state.next_action is not None
        reason: Callable[[], BaseException | None] = state.outcome.exception
        LOGGER.warning(
            "%s: %s; attempt %d in %.1f s", self.address, reason(), state.attempt_number + 1, state.next_action.sleep
        )
