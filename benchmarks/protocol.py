"""What the critic protocol and its front door cost, and how they bear many clients.

    .venv-actor/bin/python benchmarks/protocol.py [--rounds 30] [--requests 2000]

Four servers run side by side and compute nothing. `door` is the real client, front door, binding and validation, with values
made of the tokens; `tls` is the same with a certificate; `straight` has no door, its Triton listens on TCP; `bare` is PyTriton
alone, returning its input as FP32, called with plain `requests`. The calls alternate; medians are compared. The train row
sends the five tensors of a train part, and the bare echo as many bytes. Rule 10 of the protocol allows twice the bare echo; the
door may cost 1.3 times `straight` for parts of 64 MiB, and 2 ms for small calls. Then `door` alone is asked for the values of
32 x 128 tokens, by 1, 8 and 64 clients, and its memory is looked at.
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
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from nemo_style_rlhf.critic_service import protocol, validation
from nemo_style_rlhf.critic_service.protocol import ACQUIRE, INFER, TRAIN
from nemo_style_rlhf.launch.interpreter import ROOT
from nemo_style_rlhf.launch.program import SERVER_PYTHON
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.kserve import HEAD_LENGTH_HEADER, decode_response, encode_request
from nemo_style_rlhf.wire.messages import Endpoint, TensorSpec

SIZES = ((32, 1024), (128, 80), (512, 512), (1024, 2048), (1024, 4096), (1024, 16384))
ECHO = Endpoint("echo", (TensorSpec("x", "INT32"),), (TensorSpec("y", "FP32"),))
SINK = Endpoint("sink", (TensorSpec("x", "INT32"),), (TensorSpec("size", "INT64", 1),))
TOKEN = "benchmark"
VOCABULARY = 32000
WANTED = {messages.REQUEST.name: messages.json_tensor({"want": "values"})}
KINDS = ("door", "tls", "straight", "bare")
MAX_REQUEST_BYTES = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="alternating calls per size")
    parser.add_argument("--requests", type=int, default=2000, help="of each number of clients")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--ready-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.ready_file)
    else:
        measure(arguments.rounds, arguments.requests)


# --- client side ------------------------------------------------------------------------------------------------------


def measure(rounds: int, requests: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        make_certificate(Path(scratch))
        ready = {kind: Path(scratch) / f"{kind}.json" for kind in KINDS}
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
            port = ports(ready, servers)
            print_table(port, Path(scratch), rounds)
            print_load(port["door"], servers[KINDS.index("door")].pid, requests)
        finally:
            for server in servers:
                server.send_signal(signal.SIGTERM)
            for server in servers:
                server.wait(60)


def make_certificate(folder: Path) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=bench",
    ]
    files = [
        "-keyout",
        str(folder / "tls.key"),
        "-out",
        str(folder / "tls.crt"),
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run([*command, *files], check=True, capture_output=True)


def ports(ready: dict[str, Path], servers: list[Any]) -> dict[str, int]:
    while not all(path.exists() for path in ready.values()):
        if any(server.poll() is not None for server in servers):
            raise SystemExit("a server did not start: run this file with --serve door --ready-file /tmp/r to see why")
        time.sleep(0.2)
    return {kind: json.loads(path.read_text())["port"] for kind, path in ready.items()}


def print_table(port: dict[str, int], scratch: Path, rounds: int) -> None:
    import requests

    from nemo_style_rlhf.critic_service.client import parse_json
    from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig
    from nemo_style_rlhf.wire.connection import Connection

    tls = {"tls": ClientTlsConfig(ca=str(scratch / "tls.crt"))}
    connections = {
        kind: Connection("127.0.0.1", port[kind], token=TOKEN, retries=0, **(tls if kind == "tls" else {}))
        for kind in KINDS[:3]
    }
    request = {messages.REQUEST.name: messages.json_tensor({"run_id": "benchmark"})}
    leases = {kind: parse_json(connections[kind].call(ACQUIRE, request, timeout_s=60))["lease"] for kind in connections}
    session = requests.Session()

    def bare(endpoint: Endpoint, array: np.ndarray) -> dict[str, Any]:
        body, head_length = encode_request(endpoint, {"x": array})
        headers = {HEAD_LENGTH_HEADER: str(head_length), "Accept-Encoding": "identity"}
        url = f"http://127.0.0.1:{port['bare']}/v2/models/{endpoint.name}/infer"
        response = session.post(url, data=body, headers=headers)
        response.raise_for_status()
        return decode_response(response.content, int(response.headers[HEAD_LENGTH_HEADER]))

    print(
        "| call | sequences x tokens | MiB sent | door, ms | tls, ms | straight, ms | bare, ms | door / straight | door / bare |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for count, length in SIZES:
        ragged = messages.ragged([np.full(length, row % VOCABULARY, dtype=np.int32) for row in range(count)])
        trains = {kind: train_inputs(ragged, lease) for kind, lease in leases.items()}
        for endpoint, inputs, echo in (
            (INFER, dict.fromkeys(leases, ragged | WANTED), ECHO),
            (TRAIN, trains, SINK),
        ):
            sent = sum(tensor.nbytes for tensor in inputs["door"].values())
            padding = np.zeros(sent // 4, dtype=np.int32)
            calls: dict[str, Callable[[], Any]] = {
                kind: partial(connections[kind].call, endpoint, inputs[kind], timeout_s=60) for kind in connections
            }
            calls["bare"] = partial(bare, echo, padding)
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(rounds + 3):
                for kind, call in calls.items():
                    started = time.perf_counter()
                    call()
                    times[kind].append(time.perf_counter() - started)
            door, tls_ms, straight, bare_ms = (1000 * statistics.median(times[kind][3:]) for kind in KINDS)
            print(
                f"| {endpoint.name} | {count} x {length} | {sent / 2**20:.2f} | {door:.1f} | {tls_ms:.1f} | {straight:.1f} "
                f"| {bare_ms:.1f} | {door / straight:.2f} | {door / bare_ms:.2f} |",
                flush=True,
            )
    for connection in connections.values():
        connection.close()


def print_load(port: int, server: int, requests: int) -> None:
    """Print round trips of many clients, and the memory that the server's processes and /dev/shm keep per 1,000 requests."""
    from nemo_style_rlhf.wire.connection import Connection

    ragged = messages.ragged([np.full(128, row, dtype=np.int32) for row in range(32)])
    connection = Connection("127.0.0.1", port, token=TOKEN, retries=0)  # each thread has a session of its own

    def ask(_: int) -> float:
        started = time.perf_counter()
        connection.call(INFER, ragged | WANTED, timeout_s=60)
        return time.perf_counter() - started

    def kept_mib() -> float:
        process = psutil.Process(server)
        memory = [each.memory_info() for each in (process, *process.children(recursive=True))]
        private = sum(each.rss - each.shared for each in memory)  # pages of libraries are now private, now shared
        shm = os.statvfs("/dev/shm")
        return float(private + (shm.f_blocks - shm.f_bfree) * shm.f_frsize) / 2**20

    print("\n| clients | requests | p50, ms | p99, ms | requests/s | MiB kept per 1,000 after the first 1,000 |")
    print("|---|---|---|---|---|---|")
    for clients in (1, 8, 64):
        with ThreadPoolExecutor(clients) as pool:
            for _ in pool.map(ask, range(1000)):
                pass
            before, started = kept_mib(), time.perf_counter()
            times = sorted(pool.map(ask, range(requests)))
            seconds, kept = time.perf_counter() - started, kept_mib() - before
        p50, p99 = (1000 * times[int(share * len(times))] for share in (0.5, 0.99))
        print(
            f"| {clients} | {requests} | {p50:.1f} | {p99:.1f} | {requests / seconds:.0f} | {1000 * kept / requests:.2f} |",
            flush=True,
        )
    connection.close()


def train_inputs(ragged: dict[str, Any], lease: str) -> dict[str, Any]:
    """The first of two parts, repeated forever: it is validated, digested and staged, but never applied."""
    floats = np.ones(ragged["tokens"].size, dtype=np.float32)
    mask = floats.copy()
    mask[np.cumsum(ragged["sequence_lengths"]) - 1] = 0
    plan = {"lease": lease, "step": 1, "part": 1, "parts": 2}
    tensors = (*ragged.values(), floats, floats, mask, messages.json_tensor(plan))
    return {spec.name: tensor for spec, tensor in zip(TRAIN.inputs, tensors, strict=True)}


# --- server side ------------------------------------------------------------------------------------------------------


def serve(kind: str, ready_file: Path) -> None:
    if kind == "bare":
        serve_bare(ready_file)
    else:
        serve_critic(kind, ready_file)


def serve_critic(kind: str, ready_file: Path) -> None:
    """Serve with the real binding and the real validation, but without a model."""
    from nemo_style_rlhf.critic_service.ledger import Ledger
    from nemo_style_rlhf.critic_service.triton import TritonBinding
    from nemo_style_rlhf.schema.critic import CriticServerConfig, ServerTlsConfig
    from nemo_style_rlhf.wire.listening import Address, take_port

    limits = protocol.Limits(VOCABULARY, max_length=2**20, max_request_bytes=MAX_REQUEST_BYTES)
    ledger = Ledger(max_staged_bytes=2**30)

    def handle(endpoint: str, inputs: Any) -> dict[str, Any]:
        if endpoint == ACQUIRE.name:
            return {messages.RESPONSE.name: messages.json_tensor({"lease": ledger.acquire("benchmark")})}
        if endpoint == INFER.name:
            request, _ = validation.read_infer(inputs, limits)
            return {"values": request.tokens.astype(np.float32), "critic_step": np.array([0])}
        answer, _ = ledger.stage(validation.read_train(inputs, limits))
        ledger.drop()
        return {messages.RESPONSE.name: messages.json_tensor(answer)}

    config = CriticServerConfig(port=0, max_request_bytes=MAX_REQUEST_BYTES)
    if kind == "tls":
        files = (str(ready_file.with_name(f"tls.{suffix}")) for suffix in ("crt", "key"))
        config.tls = ServerTlsConfig(*files)
    address = Address(take_port("127.0.0.1", 0), TOKEN)
    if kind == "straight":
        port = listen_on_tcp()
    binding = TritonBinding(config, address, ["critic"])
    binding.start()
    door = binding.open(handle, boot_id="benchmark")
    announce(ready_file, port if kind == "straight" else door.port)
    signal.sigwait({signal.SIGTERM})
    binding.close(10)
    os._exit(0)


def listen_on_tcp() -> int:
    """Make Triton listen on a TCP port of loopback, as it did before the front door existed; returns the port."""
    from nemo_style_rlhf.critic_service.backend import Backend

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])

    def launch(backend: Any, plain: Callable[[Any], None] = Backend.launch) -> None:
        backend._triton_server_config["http-address"] = "127.0.0.1"
        backend._triton_server_config["http-port"] = port
        plain(backend)

    def is_ready(_: Any) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    Backend.launch, Backend._is_ready = launch, is_ready  # type: ignore[method-assign]
    return port


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
