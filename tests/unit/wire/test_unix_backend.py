"""A backend on a Unix socket answers as Triton does: refusals keep their code, an error of the service ends it."""

import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from nemo_style_rlhf.wire.front_door import Route
from nemo_style_rlhf.wire.kserve import HEAD_LENGTH_HEADER, decode_response, encode_request, encode_response
from nemo_style_rlhf.wire.messages import (
    BOOT_HEADER,
    Array,
    Code,
    Endpoint,
    ProtocolError,
    TensorSpec,
    text_tensor,
)
from nemo_style_rlhf.wire.unix_backend import THREADS, Handle, UnixBackend

NUMBERS, TEXTS = TensorSpec("numbers", "INT64"), TensorSpec("texts", "BYTES")
DOUBLE = Endpoint("double", (NUMBERS, TEXTS), (NUMBERS, TEXTS))
OTHER = Endpoint("other", (NUMBERS,), (NUMBERS,))
ROUTES = [Route(DOUBLE, 2**20), Route(OTHER, 2**10)]
BOOT = "0123456789abcdef"
JSON = {"parameters": {"binary_data_output": False}}


class LocalConnection(HTTPConnection):
    """HTTP to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Door:
    """Sends what a front door sends."""

    def __init__(self, path: Path, backend: UnixBackend) -> None:
        self.path, self.backend = path, backend

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, str | None]:
        connection = LocalConnection(self.path)
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(), response.getheader(HEAD_LENGTH_HEADER)
        finally:
            connection.close()

    def call(
        self, number: int = 4, endpoint: Endpoint = DOUBLE, boot: str | None = BOOT, **answers: object
    ) -> tuple[int, bytes, str | None]:
        given: dict[str, Array] = {"numbers": np.array([number], dtype=np.int64), "texts": text_tensor(["ä", "b"])}
        body, head_length = encode_request(endpoint, given, **answers)  # type: ignore[arg-type]
        headers = {HEAD_LENGTH_HEADER: str(head_length)} | ({} if boot is None else {BOOT_HEADER: boot})
        return self.post(f"/v2/models/{endpoint.name}/infer", body, headers)


def double(endpoint: str, inputs: dict[str, Array]) -> dict[str, Array]:
    assert endpoint == "double"
    return inputs | {"numbers": inputs["numbers"] * 2}


@pytest.fixture
def opened() -> Iterator[Callable[[Handle], Door]]:
    """Starts backends, in a folder whose name is short enough for a socket."""
    backends: list[UnixBackend] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(handle: Handle) -> Door:
            path = Path(folder) / f"backend{len(backends)}"
            backends.append(UnixBackend(path, ROUTES, handle, boot_id=BOOT))
            return Door(path, backends[-1])

        yield start
        for backend in backends:
            backend.close()


def error_of(answer: tuple[int, bytes, str | None]) -> ProtocolError:
    status, body, head_length = answer
    assert head_length is None
    error = ProtocolError.parse(json.loads(body)["error"])
    assert error.code.status == status
    return error


@pytest.mark.parametrize("boot", [BOOT, None, ""])
def test_a_call_gets_its_tensors_back(opened, boot):
    door = opened(double)
    assert door.path.stat().st_mode & 0o777 == 0o600
    status, body, head_length = door.call(2**61, boot=boot)
    assert status == 200
    outputs = decode_response(body, int(head_length))
    assert outputs["numbers"].tolist() == [2**62] and outputs["texts"].tolist() == ["ä".encode(), b"b"]


def test_an_answer_holds_the_outputs_that_are_asked_for(opened):
    asked = {"outputs": [{"name": "texts", "parameters": {"binary_data": True}}], **JSON}
    _, body, head_length = opened(double).call(4, answers=asked)
    assert list(decode_response(body, int(head_length))) == ["texts"]


def test_an_answer_may_lack_outputs_that_are_optional():
    optional = Endpoint("double", (), (NUMBERS, replace(TEXTS, optional=True)))
    body, head_length = encode_response(
        optional, {"numbers": np.array([1])}, {"parameters": {"binary_data_output": True}}
    )
    assert list(decode_response(body, head_length)) == ["numbers"]


def test_an_answer_in_json_has_no_tensors_behind_it(opened):
    status, body, head_length = opened(double).call(4, answers=JSON)
    assert status == 200 and head_length is None
    assert [each["data"] for each in json.loads(body)["outputs"]] == [[8], ["ä", "b"]]


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.wire)
def test_a_refusal_keeps_its_code_and_the_service_goes_on_unless_it_is_fatal(opened, code):
    def refuse(endpoint: str, inputs: dict[str, Array]) -> dict[str, Array]:
        if endpoint == "other":
            raise ProtocolError(code, "not today:\nä")
        return double(endpoint, inputs)

    door = opened(refuse)
    error = error_of(door.call(endpoint=OTHER))
    assert (error.code, error.message) == (code, "not today:\nä")
    assert door.backend.fatal.is_set() == (code is Code.NON_FINITE) and door.call()[0] == 200


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyError, ValueError, OSError], ids=lambda fault: fault.__name__)
def test_any_other_error_is_internal_and_ends_the_service(opened, fault):
    def fail(endpoint: str, inputs: dict[str, Array]) -> dict[str, Array]:
        raise fault("/a/secret/path")

    door = opened(fail)
    error = error_of(door.call())
    assert error.code is Code.INTERNAL and "double failed and the server ends" in error.message
    assert "secret" not in str(error)  # a sentence without paths
    assert door.backend.fatal.is_set()


def test_outputs_that_are_missing_end_the_service(opened):
    door = opened(lambda endpoint, inputs: {})
    assert error_of(door.call()).code is Code.INTERNAL
    assert door.backend.fatal.is_set()


def test_a_request_to_another_process_is_refused_before_it_does_anything(opened):
    called = []

    def count(endpoint: str, inputs: dict[str, Array]) -> dict[str, Array]:
        called.append(endpoint)
        return double(endpoint, inputs)

    door = opened(count)
    error = error_of(door.call(boot="fedcba9876543210"))
    assert error.code is Code.RESTARTED and BOOT in error.message and "fedcba9876543210" in error.message
    assert not called and not door.backend.fatal.is_set()


def test_a_text_whose_length_lies_is_refused(opened):
    door = opened(double)
    given = {"numbers": np.array([4], dtype=np.int64), "texts": text_tensor(["abc"])}
    body, head_length = encode_request(DOUBLE, given)
    lie = body[:-7] + b"\x09\0\0\0abc"
    answer = door.post("/v2/models/double/infer", lie, {HEAD_LENGTH_HEADER: str(head_length)})
    assert error_of(answer).code is Code.INVALID
    assert not door.backend.fatal.is_set()


def test_an_unknown_endpoint_is_not_there(opened):
    door = opened(double)
    assert door.post("/v2/models/none/infer", b"{}", {})[0] == 404
    assert door.call()[0] == 200


def test_calls_run_at_the_same_time(opened):
    """As many as there are threads: each waits until all have arrived."""
    together = threading.Barrier(THREADS)

    def meet(endpoint: str, inputs: dict[str, Array]) -> dict[str, Array]:
        together.wait(20)
        return double(endpoint, inputs)

    door = opened(meet)
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(door.call, range(THREADS)))
    assert {status for status, _, _ in answers} == {200}
    numbers = [decode_response(body, int(head_length))["numbers"].item() for _, body, head_length in answers]
    assert numbers == [2 * number for number in range(THREADS)]


def test_a_client_that_hangs_up_does_no_harm(opened):
    arrived, release = threading.Event(), threading.Event()

    def wait(endpoint: str, inputs: dict[str, Array]) -> dict[str, Array]:
        arrived.set()
        assert release.wait(20)
        return double(endpoint, inputs)

    door = opened(wait)
    given = {"numbers": np.array([4], dtype=np.int64), "texts": text_tensor(["abc"])}
    body, head_length = encode_request(DOUBLE, given)
    connection = LocalConnection(door.path)
    connection.request("POST", "/v2/models/double/infer", body, {HEAD_LENGTH_HEADER: str(head_length)})
    assert arrived.wait(20)
    connection.close()
    release.set()
    assert door.call()[0] == 200
    assert door.backend.alive and not door.backend.fatal.is_set()


def test_a_closed_backend_answers_no_more(opened):
    door = opened(double)
    door.backend.close()
    deadline = threading.Event()
    for _ in range(100):
        if not door.backend.alive:
            break
        deadline.wait(0.1)
    assert not door.backend.alive


def test_a_removed_socket_is_noticed(opened):
    door = opened(double)
    door.path.unlink()
    assert not door.backend.alive


def test_calls_of_one_endpoint_leave_room_for_those_of_another(opened):
    """As many as wait at a time: an engine still says how it stands."""
    go_on = threading.Event()

    def handle(endpoint: str, inputs: dict[str, Array]) -> dict[str, Array]:
        if endpoint == "double":
            assert go_on.wait(30)
            return double(endpoint, inputs)
        return {"numbers": inputs["numbers"]}

    door = opened(handle)
    with ThreadPoolExecutor(THREADS + 8) as pool:
        waiting = [pool.submit(door.call) for _ in range(THREADS + 8)]
        try:
            body, length = encode_request(OTHER, {"numbers": np.array([5], dtype=np.int64)})
            headers = {HEAD_LENGTH_HEADER: str(length), BOOT_HEADER: BOOT}
            assert door.post("/v2/models/other/infer", body, headers)[0] == 200
            assert not any(call.done() for call in waiting)
        finally:
            go_on.set()
        assert {call.result()[0] for call in waiting} == {200}
