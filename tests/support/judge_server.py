"""vLLM's own OpenAI-compatible server with a tiny judge, on the CPU."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import requests

from nemo_style_rlhf.launch.environment import ENVIRONMENT
from tests.support.models import save_judge
from tests.support.paths import ACTOR_PYTHON

START_S = 240.0
NAME = "tiny-judge"
KEY = "sk-of-the-judge"


@contextlib.contextmanager
def judge_server(folder: Path) -> Iterator[int]:
    """Serve a random model as ``NAME`` to those who have ``KEY``; yields the port.

    `vllm serve` itself looks for a distribution of the name vllm, which the build for CPUs has not; this is the module it runs.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [
        ACTOR_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", save_judge(folder / "judge"), "--host", "127.0.0.1",
        "--port", str(port), "--served-model-name", NAME, "--api-key", KEY, "--dtype", "float32", "--max-model-len", "1024",
        "--enforce-eager", "--kv-cache-memory-bytes", str(2**26), "--block-size", "32", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "judge.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(server, port, folder / "judge.log")
        yield port
    finally:
        server.terminate()
        server.wait(60)


def _wait(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        with contextlib.suppress(requests.ConnectionError):
            requests.get(f"http://127.0.0.1:{port}/health", timeout=10)
            return
        time.sleep(0.2)
