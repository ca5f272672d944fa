"""A judge that speaks the OpenAI API and does what it is told."""

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge:
    """Says how many letters the question has, after ``delay_s``; ``script`` holds other answers for its first requests."""

    def __init__(self, script: Sequence[tuple[int, Any]] = (), delay_s: float = 0.0) -> None:
        self.script, self.delay_s = list(script), delay_s
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.bodies.append(body)
                judge.paths.append(self.path)
                judge.keys.append(self.headers["Authorization"])
                status, answer = judge.script.pop(0) if judge.script else (200, said(str(len(judge.question(-1)))))
                time.sleep(judge.delay_s)
                with contextlib.suppress(OSError):  # nobody waits any more
                    self.send_response(status)
                    if status == 429:
                        self.send_header("Retry-After", "1")
                    self.end_headers()
                    self.wfile.write(answer.encode() if isinstance(answer, str) else json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def question(self, number: int) -> str:
        return str(self.bodies[number]["messages"][0]["content"])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def said(text: str | None, reason: str = "stop") -> dict[str, Any]:
    """A chat completion."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}
