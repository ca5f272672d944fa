"""A server process from start to exit code: load, serve, supervise, stop."""

import contextlib
import json
import logging
import os
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from nemo_style_rlhf.checkpoint import owner
from nemo_style_rlhf.checkpoint.files import write_atomically
from nemo_style_rlhf.checkpoint.names import checkpoint_id
from nemo_style_rlhf.critic_service import protocol
from nemo_style_rlhf.critic_service.binding import Binding
from nemo_style_rlhf.critic_service.service import Service
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.launch import bootstrap, interrupt
from nemo_style_rlhf.launch.follow_up import command_line
from nemo_style_rlhf.launch.starting import starting
from nemo_style_rlhf.schema.common import RunConfig
from nemo_style_rlhf.schema.critic import CriticServerConfig
from nemo_style_rlhf.wire import messages
from nemo_style_rlhf.wire.listening import FrontDoorProcess
from nemo_style_rlhf.wire.messages import REQUEST, RESPONSE, Array, json_tensor

LOGGER = logging.getLogger(__name__)
SUPERVISION_PERIOD_S = 0.5
ANSWER_DELIVERY_S = 1.0
"""Seconds that the process still delivers answers after a fatal error, so that the client learns of it."""
CLOSE_TIMEOUT_S = 2.0
DRY_RUN = "dryrun"
"""Run id of a dry run."""
Loader = Callable[[torch.device, Path], Service | WorkerGroup]


def serve(run: RunConfig, server: CriticServerConfig, binding: Binding | None, load: Loader) -> None:
    """Run a server process after :func:`binding.begin`. Returns after a dry run, otherwise ends the process.

    The exit code is 0 after ``critic_shutdown``, SIGTERM or SIGINT, 1 after a fatal error or the death of its backend.

    Args:
        load: returns the service, or the worker group on ranks after the first; takes the device and the folder to write to.
    """
    device = bootstrap.setup(run)
    # Linux sends SIGTERM for each thread of a killed launcher, so the handler may interrupt itself, and this thread's get. An
    # Event would deadlock then, and so may the log.
    signals: SimpleQueue[int] = SimpleQueue()
    loading = True

    def on_signal(number: int, _: object) -> None:
        nonlocal loading
        signals.put(number)
        if loading:  # nothing is served yet
            loading = False
            raise SystemExit(128 + number if run.dry_run else 0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    interrupt.hand_over()
    try:
        if run.dry_run:
            _rehearse(load, device)
            return
        starting("loading models")
        loaded = load(device, Path(run.output_dir))
        loading = False
    except BaseException:
        if not signals.empty():
            _log(signals.get())
        if binding is not None:
            binding.close(CLOSE_TIMEOUT_S)
        raise
    if isinstance(loaded, WorkerGroup):
        loaded.follow()
        _flush_and_exit(0)
    else:
        assert binding is not None  # it serves
        _flush_and_exit(_serve(loaded, server, binding, signals))


def _rehearse(load: Loader, device: torch.device) -> None:
    with tempfile.TemporaryDirectory(prefix="critic_dry_run_") as scratch:
        loaded = load(device, Path(scratch))
        if isinstance(loaded, WorkerGroup):
            loaded.follow()
        else:
            rehearse(loaded)
            loaded.dismiss()


def _log(number: int) -> None:
    LOGGER.info("received %s", signal.Signals(number).name)


def _serve(service: Service, config: CriticServerConfig, binding: Binding, signals: SimpleQueue[int]) -> int:
    ready_file = Path(config.ready_file) if config.ready_file is not None else None
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    starting("opening the front door")
    try:
        door = binding.open(service.handle, boot_id=service.compute_lock.boot_id)
    except BaseException:
        binding.close(CLOSE_TIMEOUT_S)
        raise
    described = {"host": door.host, "port": door.port, "pid": os.getpid(), "boot_id": service.compute_lock.boot_id}
    where = json.dumps(described).encode()
    try:
        if ready_file is not None:
            write_atomically(ready_file, where)
        then = f"; next: {_actor(service, door)}" if ready_file is None else ""
        LOGGER.info(
            "serving %s at %s, boot id %s%s", " and ".join(service.roles), door.url, service.compute_lock.boot_id, then
        )
        code = _supervise(service, binding, signals)
        grace_s = config.shutdown_grace_s if binding.alive else 0.0  # else no client would get the answer of a call
        finished = service.compute_lock.close(grace_s)
        if code != 0:
            time.sleep(ANSWER_DELIVERY_S)
        elif finished:
            service.dismiss()
        else:
            LOGGER.warning("the running call was abandoned after %.0f s and counts as not applied", grace_s)
    finally:
        if ready_file is not None and ready_file.is_file() and ready_file.read_bytes() == where:  # not another server's
            ready_file.unlink()
        binding.close(CLOSE_TIMEOUT_S)
    return code


def _actor(service: Service, door: FrontDoorProcess) -> str:
    """The command of an actor that uses this server. Only the user knows the policy and the prompts."""
    texts_alone = service.roles == ["reward"]
    section = "reward.server" if texts_alone else "remote_critic_rm"
    needed = {"algorithm": "grpo"} if "tokens" in service.roles else {"reward": "server"} if texts_alone else {}
    where = {f"{section}.host": door.host, f"{section}.port": door.port}
    given = {"model.path": "POLICY", "data.train_path": "PROMPTS", "run.output_dir": "outputs/ppo"}
    return command_line("trainers/train_ppo_actor.py", {**needed, **where, **given})


def _supervise(service: Service, binding: Binding, signals: SimpleQueue[int]) -> int:
    """Wait for a reason to end, and return its exit code."""
    while True:
        told = 0
        with contextlib.suppress(queue.Empty):
            told = signals.get(timeout=SUPERVISION_PERIOD_S)
        if binding.failed:  # check this first: the end of another rank also brings a signal
            return 1
        try:
            owner.require_owned()
        except UserError as error:
            LOGGER.error("%s; the server ends", error)
            return 1
        if told:
            _log(told)
            return 0
        if service.compute_lock.shutdown_requested.is_set():
            LOGGER.info("asked to stop by a client")
            return 0
        if not binding.alive:
            LOGGER.error("the server ends: %s", binding.why_dead())
            return 1


def _flush_and_exit(code: int) -> None:
    """Exit at once: an orderly exit would wait for the threads of an abandoned call or a dead tritonserver."""
    owner.release()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rehearse(service: Service) -> None:
    """Send one tiny request of every kind (``--dry-run``), through the service but not through the network."""
    passed = " and ".join(service.roles)
    if "reward" in service.roles:
        service.handle(protocol.REWARD_INFER.name, protocol.reward_tensors(["a", "b"], ["a", "b"]))
    if "critic" in service.roles:
        passed += f", value loss {_rehearse_critic(service):.4g}"
    if "tokens" in service.roles:
        lease, ragged = _lease_and_sequences(service)
        service.handle(protocol.INFER.name, ragged | {REQUEST.name: json_tensor({"want": "rewards"})})
        _ask(service, protocol.SLEEP, lease=lease)
        _ask(service, protocol.WAKE, lease=lease)
    LOGGER.info("dry run passed: %s", passed)


def _lease_and_sequences(service: Service) -> tuple[str, dict[str, Array]]:
    """A lease of the dry run, and the tensors of two sequences of one length."""
    status = service.status()
    lease = _ask(service, protocol.ACQUIRE, run_id=DRY_RUN, tokenizer_digest=status.tokenizer_digest)["lease"]
    length = min(4, status.max_length)
    return lease, messages.ragged([np.arange(length, dtype=np.int32) % status.vocab_size] * 2)


def _rehearse_critic(service: Service) -> float:
    """Rehearse the critic's requests, and return the loss of its train step."""
    lease, ragged = _lease_and_sequences(service)
    length = int(ragged[messages.SEQUENCE_LENGTHS.name][0])
    wanted = {REQUEST.name: json_tensor({"want": "values"})}
    values = service.handle(protocol.INFER.name, ragged | wanted)[protocol.VALUES.name]
    mask = np.array(([1.0] * (length - 1) + [0.0]) * 2, dtype=np.float32)
    arrays = (*ragged.values(), np.zeros_like(values), values, mask)
    plan = protocol.part_plan(
        lease=lease, step=1, part=1, parts=[arrays], mini_batches=[[0, 1]], normalizers=[mask.sum()]
    )
    tensors = (*arrays, json_tensor(plan))
    inputs = dict(zip((spec.name for spec in protocol.TRAIN.inputs), tensors, strict=True))
    trained = _parse(service.handle(protocol.TRAIN.name, inputs))
    _ask(service, protocol.SLEEP, lease=lease)
    checkpoint = {"lease": lease, "checkpoint_id": checkpoint_id(DRY_RUN, 1)}
    saved = _ask(service, protocol.SAVE, **checkpoint, export=True)
    _ask(service, protocol.COMMIT, **checkpoint, keep=1)
    _ask(service, protocol.RESTORE, **checkpoint, digests=saved["files"])
    _ask(service, protocol.WAKE, lease=lease)
    return float(trained["metrics"]["loss"])


def _ask(service: Service, endpoint: messages.Endpoint, **content: object) -> dict[str, Any]:
    return _parse(service.handle(endpoint.name, {REQUEST.name: json_tensor(content)}))


def _parse(answer: dict[str, Array]) -> dict[str, Any]:
    return json.loads(answer[RESPONSE.name].item(0))
