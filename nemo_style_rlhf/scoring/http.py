"""Requests to interchangeable HTTP servers: load balancing, retries, and a rest for servers that fail."""

import threading
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase

from nemo_style_rlhf.schema.judge import HttpSourceConfig
from nemo_style_rlhf.scoring.interface import RewardError, quoted
from nemo_style_rlhf.wire.balance import LeastBusy
from nemo_style_rlhf.wire.sessions import Sessions

Answer = TypeVar("Answer")
NO_PROXY: Mapping[str, str | None] = {"http": None, "https": None, "all": None}
"""Ignores the environment's proxies."""
LONGEST_ADVISED_WAIT_S = 60


class HttpServers:
    """Posts JSON to one of several interchangeable servers. Thread-safe."""

    def __init__(
        self, config: HttpSourceConfig, *, rank: int, route: str = "", auth: AuthBase | None = None,
        refusals: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Prepare requests to the servers of ``config``.

        Args:
            route: end of the addresses of requests.
            refusals: HTTP statuses with which a healthy server refuses one request, as the other servers would.
        """
        self._config = config
        self._route, self._auth, self._refusals = route, auth, refusals
        self._servers = LeastBusy(config.urls, rest_s=config.cooldown_s, first=rank)
        self.closing = threading.Event()
        self._sessions = Sessions()

    def close(self) -> None:
        """End the requests under way, and make no further attempt."""
        self.closing.set()
        self._sessions.close()

    def ask(self, body: Mapping[str, object], read: Callable[[object, str], Answer]) -> Answer:
        """Send ``body`` to a server, and return what ``read`` makes of its JSON answer and its name for errors.

        Raises:
            RewardError: every attempt failed, one was refused, or the source was closed; the sentence gives the last reason.
        """
        config = self._config
        for _ in self._servers.attempts(config.retries + 1, self.closing):
            if self.closing.is_set():
                break
            try:
                with self._servers.take() as url:
                    answer = self._post(url, body)
                    if answer.status_code not in self._refusals:
                        return read(self._json(url, answer), f"the {config.called} {url}")
            except (requests.RequestException, RewardError) as error:
                last = error if isinstance(error, RewardError) else self._explain(url, error)
            else:
                raise self._refusal(url, answer)
        else:
            raise RewardError(
                f"{config.retries + 1} attempts failed ({config.section}.retries={config.retries}), the last because {last}"
            ) from last
        raise RewardError(f"the {config.called}s were closed before they answered")

    def _post(self, url: str, body: Mapping[str, object]) -> requests.Response:
        with self._sessions.new() as session:
            answer = session.post(
                url + self._route, json=body, timeout=self._config.timeout_s, auth=self._auth,
                proxies=dict(NO_PROXY) if is_loopback(url) else None,  # type: ignore[arg-type]  # None means none
            )  # fmt: skip
        if not answer.ok and answer.status_code not in self._refusals:
            if (wait_s := answer.headers.get("Retry-After", "")).isdecimal():
                self.closing.wait(min(int(wait_s), LONGEST_ADVISED_WAIT_S))
            raise self._refusal(url, answer)
        return answer

    def _json(self, url: str, answer: requests.Response) -> object:
        try:
            return answer.json()
        except ValueError as error:
            raise RewardError(
                f"the {self._config.called} {url} answered {quoted(answer.text)}, expected JSON: correct what it returns"
            ) from error

    def _refusal(self, url: str, answer: requests.Response) -> RewardError:
        advice = {
            401: f"give its key in {self._config.section}.token",
            403: f"give its key in {self._config.section}.token",
            404: f"correct {self._config.section}.urls or model",
        }.get(answer.status_code if self._refusals else 0, "look at its log")
        said = " ".join(_message(answer).split())[:200]
        return RewardError(
            f"the {self._config.called} {url} answered {answer.status_code} {answer.reason}"
            f"{f' ({said})' if said else ''}: {advice}"
        )

    def _explain(self, url: str, error: requests.RequestException) -> RewardError:
        called, section = self._config.called, self._config.section
        if isinstance(error, requests.Timeout):
            return RewardError(
                f"the {called} {url} did not answer within {self._config.timeout_s:g} s: "
                f"raise {section}.timeout_s or make it faster"
            )
        if isinstance(error, requests.ConnectionError):
            return RewardError(f"the {called} {url} cannot be reached: start it, or correct {section}.urls")
        return RewardError(f"the request to the {called} {url} failed ({error}): correct {section}.urls")


def is_loopback(url: str) -> bool:
    """True if ``url`` names this host. To a proxy, the same name is the proxy's own host."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _message(answer: requests.Response) -> str:
    """The message of an error in the OpenAI API's form; empty if there is none."""
    try:
        error = answer.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""
