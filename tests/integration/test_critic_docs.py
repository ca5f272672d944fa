"""The examples of docs/protocol.md, as printed there, against the real server."""

import re
import subprocess
import sys

import pytest

from tests.support.critic_server import CriticServer
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "protocol.md").read_text()


def block(language: str, containing: str) -> str:
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if containing in text)


def test_the_curl_example(shared_server: CriticServer) -> None:
    script = block("bash", "critic_infer").replace("127.0.0.1:5567", f"127.0.0.1:{shared_server.port}")
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60, check=True)
    assert '\\"critic_step\\"' in done.stdout
    assert '"name":"values","datatype":"FP32","shape":[5]' in done.stdout
    assert '"name":"rewards","datatype":"FP32","shape":[1]' in done.stdout


def test_the_numpy_example(shared_server: CriticServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block("python", "import numpy"), str(shared_server.port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.search(r"^values \[.*\]$", done.stdout, re.MULTILINE)
    assert re.search(r"^rewards \[.*\]$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["critic_status", "critic_infer", "critic_train", "critic_save", "critic_restore", "reward_infer"]
)
def test_every_endpoint_is_described(name: str) -> None:
    assert f"| `{name}` |" in PAGE
