"""The critic process from start to exit code (rule 8): load, serve, supervise, stop."""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from nemo_style_rlhf.checkpoint.files import write_atomically
from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.protocol import REQUEST, RESPONSE, Array, json_tensor
from nemo_style_rlhf.critic_service.service import CriticService
from nemo_style_rlhf.critic_service.store import HalfStore
from nemo_style_rlhf.critic_service.triton import Door
from nemo_style_rlhf.critic_service.worker import CriticWorker
from nemo_style_rlhf.launch import bootstrap
from nemo_style_rlhf.schema.critic import PPOCriticConfig, ServerConfig

LOGGER = logging.getLogger(__name__)
SUPERVISION_PERIOD_S = 0.5
ANSWER_DELIVERY_S = 1.0
"""A fatal error is still told to the client; after this long the process goes down."""
CLOSE_TIMEOUT_S = 10.0


def serve(config: PPOCriticConfig, token: str | None) -> None:
    """Run the critic process after :func:`triton.preflight`; returns after a dry run, else ends the process.

    The exit code is 0 after ``critic_shutdown``, SIGTERM or SIGINT, 1 after a fatal error or the death of tritonserver.
    """
    device = bootstrap.setup(config.run)
    bootstrap.init_distributed(device)
    stop = threading.Event()

    def on_signal(number: int, _: object) -> None:
        LOGGER.info("received %s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    worker = CriticWorker(config, device)
    if config.run.dry_run:
        with tempfile.TemporaryDirectory(prefix="critic_dry_run_") as scratch:
            rehearse(CriticService(worker, HalfStore(Path(scratch)), max_request_bytes=config.server.max_request_bytes))
        return
    service = CriticService(
        worker, HalfStore(Path(config.run.output_dir)), max_request_bytes=config.server.max_request_bytes
    )
    _flush_and_exit(_serve(service, config.server, token, stop))


def _serve(service: CriticService, config: ServerConfig, token: str | None, stop: threading.Event) -> int:
    ready_file = Path(config.ready_file) if config.ready_file is not None else None
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    logging.getLogger("pytriton").setLevel(logging.INFO if config.verbose else logging.ERROR)
    door = Door(config, service.handle, roles=service.roles, boot_id=service.boot_id, token=token)
    try:
        where = {"host": door.host, "port": door.port, "pid": os.getpid(), "boot_id": service.boot_id}
        if ready_file is not None:
            write_atomically(ready_file, json.dumps(where).encode())
        LOGGER.info(
            "serving %s at http://%s:%d, boot id %s", " and ".join(service.roles), door.host, door.port, service.boot_id
        )
        code = _supervise(service, door, stop)
        if code == 0 and not service.stop(config.shutdown_grace_s):
            LOGGER.warning(
                "the running call was abandoned after %.0f s and counts as not applied", config.shutdown_grace_s
            )
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
        door.close(CLOSE_TIMEOUT_S)
    return code


def _supervise(service: CriticService, door: Door, stop: threading.Event) -> int:
    """Wait for a reason to end; its exit code."""
    while True:
        if stop.wait(SUPERVISION_PERIOD_S):
            return 0
        if service.shutdown_requested.is_set():
            LOGGER.info("asked to stop by the actor")
            return 0
        if door.fatal.is_set():
            stop.wait(ANSWER_DELIVERY_S)
            return 1
        if not door.alive:
            LOGGER.error("tritonserver died, the server ends; the last lines of its log:\n%s", door.log_tail())
            return 1


def _flush_and_exit(code: int) -> None:
    """End now: an abandoned call or a dead tritonserver leaves threads that an orderly exit would wait for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rehearse(service: CriticService) -> None:
    """``--dry-run``: one tiny request of every kind, through the service but not through the network."""
    status = service.status()
    lease = _ask(service, protocol.ACQUIRE, run_id="dry-run", tokenizer_digest=status.tokenizer_digest)["lease"]
    length = min(4, status.max_length)
    ragged = protocol.ragged([np.arange(length, dtype=np.int32) % status.vocab_size] * 2)
    values = service.handle(protocol.INFER.name, ragged)[protocol.VALUES.name]
    if "reward" in status.roles:
        texts = {spec.name: protocol.text_tensor(["a", "b"]) for spec in protocol.REWARD_INFER.inputs}
        service.handle(protocol.REWARD_INFER.name, texts)
    mask = np.array(([1.0] * (length - 1) + [0.0]) * 2, dtype=np.float32)
    arrays = (*ragged.values(), np.zeros_like(values), values, mask)
    plan = protocol.part_plan(
        lease=lease, step=1, part=1, parts=[arrays], mini_batches=[[0, 1]], normalizers=[mask.sum()]
    )
    tensors = (*arrays, json_tensor(plan))
    inputs = dict(zip((spec.name for spec in protocol.TRAIN.inputs), tensors, strict=True))
    trained = _parse(service.handle(protocol.TRAIN.name, inputs))
    saved = _ask(service, protocol.SAVE, lease=lease, checkpoint_id="dry-run", export=True)
    _ask(service, protocol.COMMIT, lease=lease, checkpoint_id="dry-run", keep=1)
    _ask(service, protocol.RESTORE, lease=lease, checkpoint_id="dry-run", digests=saved["files"])
    LOGGER.info("dry run passed: %s, value loss %.4g", " and ".join(service.roles), trained["metrics"]["loss"])


def _ask(service: CriticService, endpoint: protocol.Endpoint, **content: object) -> dict[str, Any]:
    return _parse(service.handle(endpoint.name, {REQUEST.name: json_tensor(content)}))


def _parse(answer: dict[str, Array]) -> dict[str, Any]:
    return json.loads(answer[RESPONSE.name].item(0))
