"""What the critic protocol costs beside a bare PyTriton echo of the same bytes (rule 10: at most twice).

    .venv-actor/bin/python benchmarks/protocol.py [--rounds 30]

Two servers run side by side and compute nothing. `critic` is the real client, binding, token check and validation, with
values made of the tokens; `bare` is PyTriton alone, returning its input as FP32, called with plain `requests`. The calls
alternate; medians are compared. The train row sends the five tensors of a train part, and the bare echo as many bytes.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nemo_style_rlhf.critic_service import protocol, validation
from nemo_style_rlhf.critic_service.kserve import HEAD_LENGTH_HEADER, decode_response, encode_request
from nemo_style_rlhf.critic_service.protocol import ACQUIRE, INFER, TRAIN, Endpoint, TensorSpec

ROOT = Path(__file__).resolve().parents[1]
SERVER_PYTHON = ROOT / ".venv-server" / "bin" / "python"
SIZES = ((128, 80), (512, 512), (1024, 2048), (1024, 8192))
ECHO = Endpoint("echo", (TensorSpec("x", "INT32"),), (TensorSpec("y", "FP32"),))
SINK = Endpoint("sink", (TensorSpec("x", "INT32"),), (TensorSpec("size", "INT64", 1),))
TOKEN = "benchmark"
VOCABULARY = 32000
MAX_REQUEST_BYTES = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="alternating calls per size")
    parser.add_argument("--serve", choices=("critic", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--ready-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        {"critic": serve_critic, "bare": serve_bare}[arguments.serve](arguments.ready_file)
    else:
        measure(arguments.rounds)


# --- client side ------------------------------------------------------------------------------------------------------


def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        ready = {kind: Path(scratch) / f"{kind}.json" for kind in ("critic", "bare")}
        log = (Path(scratch) / "log").open("wb")
        servers = [
            subprocess.Popen(
                [SERVER_PYTHON, __file__, "--serve", kind, "--ready-file", path],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )
            for kind, path in ready.items()
        ]
        try:
            print_table(ports(ready, servers), rounds)
        finally:
            for server in servers:
                server.send_signal(signal.SIGTERM)
            for server in servers:
                server.wait(60)


def ports(ready: dict[str, Path], servers: list[Any]) -> dict[str, int]:
    while not all(path.exists() for path in ready.values()):
        if any(server.poll() is not None for server in servers):
            raise SystemExit("a server did not start: run this file with --serve critic --ready-file /tmp/r to see why")
        time.sleep(0.2)
    return {kind: json.loads(path.read_text())["port"] for kind, path in ready.items()}


def print_table(port: dict[str, int], rounds: int) -> None:
    import requests

    from nemo_style_rlhf.critic_service.client import parse_json
    from nemo_style_rlhf.critic_service.connection import Connection

    connection = Connection("127.0.0.1", port["critic"], token=TOKEN, retries=0)
    session = requests.Session()
    request = {protocol.REQUEST.name: protocol.json_tensor({"run_id": "benchmark"})}
    lease = parse_json(connection.call(ACQUIRE, request, timeout_s=60))["lease"]

    def bare(endpoint: Endpoint, array: np.ndarray) -> dict[str, Any]:
        body, head_length = encode_request(endpoint, {"x": array})
        headers = {HEAD_LENGTH_HEADER: str(head_length), "Accept-Encoding": "identity"}
        url = f"http://127.0.0.1:{port['bare']}/v2/models/{endpoint.name}/infer"
        response = session.post(url, data=body, headers=headers)
        response.raise_for_status()
        return decode_response(response.content, int(response.headers[HEAD_LENGTH_HEADER]))

    print("| call | sequences x tokens | MiB sent | critic, ms | bare PyTriton, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for count, length in SIZES:
        sequences = [np.full(length, row % VOCABULARY, dtype=np.int32) for row in range(count)]
        ragged = protocol.ragged(sequences)
        calls: list[tuple[str, Callable[[], Any], Callable[[], Any], int]] = []
        sent = ragged["tokens"].nbytes + ragged["sequence_lengths"].nbytes
        calls.append(
            (
                "critic_infer",
                lambda: connection.call(INFER, protocol.ragged(sequences), timeout_s=60),  # noqa: B023
                lambda: bare(ECHO, np.concatenate(sequences)),  # noqa: B023
                sent,
            )
        )
        inputs = train_inputs(ragged, lease)
        sent = sum(tensor.nbytes for tensor in inputs.values())
        padding = np.zeros(sent // 4, dtype=np.int32)
        calls.append(
            (
                "critic_train, a part",
                lambda: connection.call(TRAIN, inputs, timeout_s=60),  # noqa: B023
                lambda: bare(SINK, padding),  # noqa: B023
                sent,
            )
        )
        for name, ours, theirs, nbytes in calls:
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds + 3):
                for call, into in zip((ours, theirs), times, strict=True):
                    started = time.perf_counter()
                    call()
                    into.append(time.perf_counter() - started)
            mine, bare_time = (1000 * statistics.median(each[3:]) for each in times)
            print(
                f"| {name} | {count} x {length} | {nbytes / 2**20:.2f} | {mine:.1f} | {bare_time:.1f} "
                f"| {mine / bare_time:.2f} |",
                flush=True,
            )
    connection.close()


def train_inputs(ragged: dict[str, Any], lease: str) -> dict[str, Any]:
    """The first part of two, repeated for ever: validated, digested and staged, never applied."""
    floats = np.ones(ragged["tokens"].size, dtype=np.float32)
    mask = floats.copy()
    mask[np.cumsum(ragged["sequence_lengths"]) - 1] = 0
    plan = {"lease": lease, "step": 1, "part": 1, "parts": 2}
    tensors = (*ragged.values(), floats, floats, mask, protocol.json_tensor(plan))
    return {spec.name: tensor for spec, tensor in zip(TRAIN.inputs, tensors, strict=True)}


# --- server side ------------------------------------------------------------------------------------------------------


def serve_critic(ready_file: Path) -> None:
    """The real binding and the real validation around no model at all."""
    from nemo_style_rlhf.critic_service.ledger import Ledger
    from nemo_style_rlhf.critic_service.triton import Address, Binding, take_port
    from nemo_style_rlhf.schema.critic import ServerConfig

    limits = protocol.Limits(VOCABULARY, max_length=2**20, max_request_bytes=MAX_REQUEST_BYTES)
    ledger = Ledger()

    def handle(endpoint: str, inputs: Any) -> dict[str, Any]:
        if endpoint == ACQUIRE.name:
            return {protocol.RESPONSE.name: protocol.json_tensor({"lease": ledger.acquire("benchmark")})}
        if endpoint == INFER.name:
            request = validation.read_infer(inputs, limits)
            return {"values": request.tokens.astype(np.float32), "critic_step": np.array([0])}
        answer, _ = ledger.stage(validation.read_train(inputs, limits))
        ledger.drop()
        return {protocol.RESPONSE.name: protocol.json_tensor(answer)}

    config = ServerConfig(port=0, max_request_bytes=MAX_REQUEST_BYTES)
    address = Address(take_port("127.0.0.1", 0), TOKEN)
    door = Binding(config, handle, address, roles=["critic"], boot_id="benchmark")
    announce(ready_file, door.port)
    signal.sigwait({signal.SIGTERM})
    door.close(10)
    os._exit(0)


def serve_bare(ready_file: Path) -> None:
    from pytriton.model_config import ModelConfig, Tensor  # type: ignore[import-untyped]
    from pytriton.triton import Triton, TritonConfig  # type: ignore[import-untyped]

    from nemo_style_rlhf.critic_service.backend import let_stub_find_libpython

    let_stub_find_libpython()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = TritonConfig(http_address="127.0.0.1", http_port=port, allow_grpc=False, allow_metrics=False)
    with Triton(config=config) as triton:
        for endpoint, answer in (
            (ECHO, lambda x: {"y": x.astype(np.float32)}),
            (SINK, lambda x: {"size": np.array([x.size])}),
        ):
            triton.bind(
                endpoint.name,
                lambda requests, answer=answer: [answer(requests[0].data["x"])],
                inputs=[Tensor(name="x", dtype=np.int32, shape=(-1,))],
                outputs=[Tensor(name=spec.name, dtype=spec.dtype, shape=(-1,)) for spec in endpoint.outputs],
                config=ModelConfig(batching=False),
                strict=True,
            )
        triton.connect()
        announce(ready_file, port)
        signal.sigwait({signal.SIGTERM})


def announce(ready_file: Path, port: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ready_file.write_text(json.dumps({"port": port}))


if __name__ == "__main__":
    main()
