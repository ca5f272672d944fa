"""Base classes of all answers of the page's server: the door, headers, JSON, sentences for errors."""

import asyncio
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tornado.web import HTTPError, RequestHandler, StaticFileHandler

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.watch.door import Door
from nemo_style_rlhf.watch.runs import UnknownRun
from nemo_style_rlhf.wire.entrance import visitor_of

PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
log = logging.getLogger(__name__)


class Guarded(RequestHandler):
    """Answers only requests that have the token and use this host's own name."""

    @property
    def door(self) -> Door:
        door: Door = self.settings["door"]
        return door

    def set_default_headers(self) -> None:
        for name, value in HEADERS.items():
            self.set_header(name, value)
        self.clear_header("Server")

    def prepare(self) -> None:
        if not self.door.is_here(self.request.host):
            raise HTTPError(403, "this page answers only under its host's own name or address")
        if not self.knows(self._shown_token()):
            raise HTTPError(401, "this page wants its token: open the link that watch.py printed, or give the token")

    def knows(self, token: str) -> bool:
        return visitor_of(self.request).shows(token, self.door.token)

    def _shown_token(self) -> str:
        header = self.request.headers.get("Authorization", "")
        return header.removeprefix("Bearer ") if header else self.get_cookie(self.cookie_name) or ""

    @property
    def cookie_name(self) -> str:
        """The name contains the port, since cookies of a host are shared among its ports."""
        return f"nsr_watch_{self.door.listener.getsockname()[1]}"

    def let_in(self, token: str) -> None:
        """Remember a correct token."""
        secure = self.door.tls is not None
        self.set_cookie(self.cookie_name, token, httponly=True, samesite="Lax", secure=secure, expires_days=30)

    def write_error(self, status_code: int, **details: Any) -> None:
        """Answer with one sentence. Unexpected errors go to the terminal, with their traceback."""
        error = details.get("exc_info", (None, None, None))[1]
        if isinstance(error, HTTPError):
            sentence = (error.log_message or "there is nothing at this address").replace(
                "%%", "%"
            )  # Tornado doubles them
        else:
            sentence = "the server failed: its terminal says why"
        self.answer_error(sentence)

    def answer_error(self, sentence: str) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{sentence}\n")

    def log_exception(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, HTTPError):
            log.error("%s %s\n%s", self.request.method, self.request.path, "".join(traceback.format_exception(error)))


class Page(Guarded, StaticFileHandler):
    """The files of the page. A browser without the token gets a form that asks for it."""

    def prepare(self) -> None:
        token = self.get_query_argument("token", None)
        if token is None or not self.door.is_here(self.request.host):
            return super().prepare()
        if not self.knows(token):
            raise HTTPError(401, "this is not the token of this page")
        self.let_in(token)
        rest = [
            (name, value)
            for name in self.request.query_arguments
            if name != "token"
            for value in self.get_query_arguments(name)
        ]
        self.redirect(f"/?{urlencode(rest)}" if rest else "/")

    def get_content_type(self) -> str:
        return TYPES.get(Path(self.absolute_path or "").suffix, "application/octet-stream") + "; charset=utf-8"

    def answer_error(self, sentence: str) -> None:
        if self.get_status() != 401 or self.request.path != "/":
            return super().answer_error(sentence)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish((PAGE / "token.html").read_text())


class Login(Guarded):
    """Takes the token from the form, rather than from an address that a browser would remember."""

    def prepare(self) -> None:
        if not self.door.is_here(self.request.host):
            super().prepare()

    def post(self) -> None:
        token = self.get_body_argument("token", "").strip()
        if not self.knows(token):
            raise HTTPError(401, "this is not the token of this page: go back and try again")
        self.let_in(token)
        self.redirect("/")


class Style(Page):
    """The style sheet. It needs no token, because the form that asks for one uses it."""

    def prepare(self) -> None:
        if not self.door.is_here(self.request.host):
            super().prepare()


class Api(Guarded):
    """Answers with JSON. :meth:`reply` takes work on files to a thread."""

    async def reply(self, work: Callable[[], Any]) -> None:
        """Answer with what ``work``, called in a thread, returns."""
        try:
            answer = await asyncio.get_running_loop().run_in_executor(None, lambda: to_json(work()))
        except UnknownRun as error:
            raise HTTPError(404, str(error)) from error
        except UserError as error:
            raise HTTPError(400, str(error)) from error
        self.set_header("Content-Type", "application/json")
        self.finish(answer)

    def number(self, name: str, default: int) -> int:
        """A whole number of the query.

        Raises:
            HTTPError: it is not a whole number.
        """
        given = self.get_query_argument(name, str(default))
        try:
            return int(given)
        except ValueError as error:
            raise HTTPError(400, f"{name} is no whole number") from error

    def answer_error(self, sentence: str) -> None:
        self.set_header("Content-Type", "application/json")
        self.finish(to_json({"error": sentence}))


def to_json(value: Any) -> str:
    """Strict JSON: NaN and infinity, which browsers refuse, become null.

    Pure ASCII, so that no text can break out of its surroundings.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value
