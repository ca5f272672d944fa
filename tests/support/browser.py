"""A real browser without a screen: Chromium as the PySide6-WebEngine wheel carries it, driven over the DevTools protocol."""

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

START_TIMEOUT_S = 60
WINDOW = """
import sys
from PySide6.QtCore import QUrl
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

application = QApplication(sys.argv)
view = QWebEngineView()
view.load(QUrl("about:blank"))
view.show()
application.exec()
"""
CHROMIUM_FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-dev-shm-usage"


class Browser:
    """One window; a context manager."""

    def __init__(self, profile: Path) -> None:
        """``profile`` is an empty folder for what the browser keeps."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "QT_QPA_PLATFORM": "offscreen",
            "QTWEBENGINE_REMOTE_DEBUGGING": f"127.0.0.1:{self._port}",
            "QTWEBENGINE_CHROMIUM_FLAGS": CHROMIUM_FLAGS,
            "XDG_DATA_HOME": str(profile),
            "XDG_CACHE_HOME": str(profile),
        }
        self._log = profile / "browser.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([sys.executable, "-c", WINDOW], env=environment, stdout=log, stderr=log)

    def __enter__(self) -> "Browser":
        # Without pings: while a test does something else, a page's many events keep answers to them waiting.
        self._socket = connect(self._address(), max_size=None, open_timeout=START_TIMEOUT_S, ping_interval=None)
        self._last_id = 0
        self.problems: list[str] = []
        self._ours: tuple[str, ...] = ("about:",)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")
        self.resize(1280, 900)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def open(self, place: Path | str) -> None:
        """A file, or the address of a server of ours, once its scripts have run."""
        url = place if isinstance(place, str) else place.resolve().as_uri()
        self.command("Page.navigate", url="about:blank")  # until it is there, the page before may ask its own server
        self.wait("location.protocol === 'about:'")
        self._ours = ("file:", "data:", "about:") if isinstance(place, Path) else ("data:", urljoin(url, "/"))
        self.command("Page.navigate", url=url)
        self.wait(f"document.readyState + location.protocol === 'complete{url.partition(':')[0]}:'")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression holds."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.run(condition):
            assert time.monotonic() < deadline, (condition, self.problems, self.run("document.body.innerText"))
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key as from a keyboard, in whatever has the focus: a character, or a name such as Escape."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40}
        given = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0), **text}
        self.command("Input.dispatchKeyEvent", type="keyDown", **given)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes.get(key, 0))

    def type(self, text: str) -> None:
        for key in text:
            self.press(key)

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def dark(self, on: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))

    def command(self, method: str, **parameters: object) -> Any:
        """One command of the protocol; what the page reports meanwhile goes to ``problems``."""
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            try:
                message = json.loads(self._socket.recv(START_TIMEOUT_S))
            except (ConnectionClosed, TimeoutError) as error:
                raise RuntimeError(f"{method}: {self._log.read_text()}") from error
            if message.get("id") == self._last_id:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        """Errors of scripts, refused requests, and every request that goes elsewhere than to the page's own place."""
        method, parameters = message["method"], message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(parameters["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(self._ours):
                self.problems.append(f"request for {url}")

    def _address(self) -> str:
        """Of the window's page, once the browser answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/json/list", timeout=5) as answer:
                    pages = [page for page in json.load(answer) if page["type"] == "page"]
            except OSError:
                pages = []
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
            time.sleep(0.1)
