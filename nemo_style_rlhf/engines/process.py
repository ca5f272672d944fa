"""An engine process from start to exit code: load, serve, stop."""

import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from nemo_style_rlhf.checkpoint.files import write_atomically
from nemo_style_rlhf.engines import messages
from nemo_style_rlhf.engines.service import EngineService
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.generation.factory import make_generator, require_host
from nemo_style_rlhf.generation.in_process import InProcessGenerator
from nemo_style_rlhf.launch import bootstrap, interrupt
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.schema.engine_process import EngineProcessConfig
from nemo_style_rlhf.wire.front_door import Route
from nemo_style_rlhf.wire.listening import Address, FrontDoorProcess
from nemo_style_rlhf.wire.short_paths import parent_of_sockets
from nemo_style_rlhf.wire.unix_backend import UnixBackend

LOGGER = logging.getLogger(__name__)
CALLS_IN_FLIGHT = 64
"""Maximum number of calls of the largest size that wait at once."""
CLOSE_TIMEOUT_S = 2.0
ANSWER_DELIVERY_S = 1.0
"""Seconds for which the process still delivers answers after a failed load, so that the trainer learns of it."""


def serve(config: EngineProcessConfig, address: Address) -> None:
    """Run an engine. Ends the process: with 0 after SIGTERM, Ctrl-C or ``engine_shutdown``, with 1 after a failure."""
    device = bootstrap.setup(config.run, samples=True)
    require_host(config.generation, device)
    # Linux sends SIGTERM for each thread of a killed trainer. An Event could deadlock: a second signal may interrupt its set().
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    interrupt.hand_over()
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    described = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    text = described.get_text_config()
    length = config.sequences.max_length or _positions(text, config.model.path)
    generator = make_generator(
        config.model, config.generation, tokenizer=tokenizer, device=device, seed=config.run.seed, max_model_len=length,
        stop_strings=config.sequences.stop_strings, sleeps=config.placement.in_turns,
    )  # fmt: skip
    assert isinstance(generator, InProcessGenerator)
    if config.placement.in_turns:
        generator.sleep()
    boot_id = secrets.token_hex(8)
    ready_file = None if config.server.ready_file is None else Path(config.server.ready_file)
    service = EngineService(
        generator, boot_id=boot_id, max_sequence_length=length, vocabulary=text.vocab_size,
        max_request_bytes=config.server.max_request_bytes, folder=None if ready_file is None else ready_file.parent,
        thorough=bool(config.run.deterministic),
    )  # fmt: skip
    routes = [Route(endpoint, config.server.max_request_bytes) for endpoint in messages.ENDPOINTS]
    with tempfile.TemporaryDirectory(prefix="nsr_engine_", dir=parent_of_sockets()) as folder:
        backend = UnixBackend(Path(folder) / "engine", routes, service.handle, boot_id=boot_id)
        in_flight = CALLS_IN_FLIGHT * config.server.max_request_bytes
        door = FrontDoorProcess(
            config.server,
            address,
            backend=Path(folder) / "engine",
            metrics=None,
            routes=routes,
            bytes_in_flight=in_flight,
            afterwards=["rm", "-r", folder],
        )
        host = _reached(config.server.host)
        named = {"host": host, "hostname": socket.gethostname()}
        where = json.dumps(named | {"port": door.port, "pid": os.getpid(), "boot_id": boot_id}).encode()
        if ready_file is not None:
            ready_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ready_file, where)
        LOGGER.info("engine at %s, boot id %s", door.url, boot_id)
        broken = lambda: service.failed.is_set() or backend.fatal.is_set() or not (door.alive and backend.alive)  # noqa: E731
        try:
            service.run(lambda: bool(told) or service.shutdown_requested.is_set() or broken())
            failed = broken()
            if failed:
                time.sleep(ANSWER_DELIVERY_S)
        finally:
            if ready_file is not None and ready_file.is_file() and ready_file.read_bytes() == where:
                ready_file.unlink()
            door.close(CLOSE_TIMEOUT_S)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(failed))  # an orderly exit would wait for threads of calls whose clients are gone


def _reached(host: str) -> str:
    """The name under which other hosts reach an engine that listens on ``host``."""
    return socket.gethostname() if host.strip("[]") in ("0.0.0.0", "::") else host


def _positions(text: PretrainedConfig, path: str) -> int:
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None:
        raise UserError(f"{path} names no largest number of positions: set sequences.max_length")
    return int(positions)
