"""The critic server as a target of malformed requests: what they are made of, and the state that they must not change."""

import json
from functools import partial
from pathlib import Path

from nemo_style_rlhf.schema.common import TokenConfig
from nemo_style_rlhf.schema.remote_critic import ClientTlsConfig
from tests.fuzz.fuzzer import (
    JSON_CALLS,
    MUTATIONS,
    TOKEN,
    Random,
    post,
    valid_infer,
    valid_json,
    valid_reward,
    valid_status,
    valid_train,
)
from tests.fuzz.http_faults import FAULTS, REFUSED, Wire, metrics
from tests.fuzz.kserve_faults import KSERVE_MUTATIONS, as_json, pick, send_json
from tests.support.critic_server import KEPT_BYTES, TOKEN_ENV, CriticServer
from tests.support.models import save_reward_model

NOBODYS_LEASE = "nobody's"
BEFORE, AFTER = "test-step_000001", "test-step_000002"
"""Ids of the checkpoints before and after the attacks."""


class CriticCalls:
    """Requests to a critic server, right and wrong, of the trainer with ``lease``."""

    def __init__(self, lease: str = "the lease", *, backend: str = "pytriton") -> None:
        self.faults = [fault for fault in FAULTS if fault is not metrics or backend == "pytriton"]
        self._lease = lease

    def wrong(self, draw: Random) -> tuple[Wire, str]:
        """A request that must be refused, and the name of its fault."""
        call = partial(valid_json, self._lease, int(draw.integers(JSON_CALLS)))
        makers = [valid_infer, partial(valid_train, self._lease), call, call, valid_reward, valid_status]
        raw = pick(draw, makers)()
        mutation = pick(draw, MUTATIONS + KSERVE_MUTATIONS)
        if not raw.tensors and mutation in MUTATIONS:  # there is no tensor to make wrong
            mutation = pick(draw, KSERVE_MUTATIONS)
        mutation(raw, draw)
        return Wire.of(raw, REFUSED | {401}), f"{mutation.__name__} of {raw.model}"

    def harmless(self, draw: Random) -> Wire:
        """A correct request that changes nothing, or would change something but has no lease: any answer is accepted."""
        call = partial(valid_json, NOBODYS_LEASE, int(draw.integers(JSON_CALLS)))
        makers = [valid_infer, valid_infer, valid_reward, valid_status, partial(valid_train, NOBODYS_LEASE), call, call]
        chosen = int(draw.integers(len(makers)))
        raw = makers[chosen]()
        if draw.random() < 0.25:
            send_json(raw, json.dumps(as_json(raw)).encode())
        return Wire.of(raw, {200} if chosen < 4 else {400})


class CriticTarget:
    """A critic server whose lease the attacks know."""

    kept_limit = KEPT_BYTES

    def __init__(
        self, folder: Path, settings: list[str], token_file: Path, ca: str | None, backend: str = "pytriton"
    ) -> None:
        model = save_reward_model(folder / "model", pad_token_id=0)
        settings = [*settings, f"server.metrics={backend == 'pytriton'}"]
        self._server = CriticServer(folder / "server", model, settings, {TOKEN_ENV: TOKEN}, backend=backend)
        try:
            token = TokenConfig(token_file=str(token_file))
            self._critic = self._server.start().client(token=token, tls=ClientTlsConfig(ca=ca))
            self._critic.save(BEFORE).result()
        except BaseException:
            self._server.close()
            raise
        self.port, self.log = self._server.port, self._server.log
        self.processes, self.kept_bytes, self.status = (
            self._server.processes,
            self._server.kept_bytes,
            self._critic.status,
        )
        self._post = partial(post, self, ca=ca)
        self.calls = CriticCalls(self._critic._require_lease(), backend=backend)

    def answers(self) -> list[bytes]:
        """Answers to good requests, which are always the same."""
        return [self._post(valid()).content for valid in (valid_infer, valid_reward)]

    def check_at_end(self) -> None:
        """Check that weights, optimizer and schedule are equal to the bit, and that a train step succeeds."""
        after = self._critic.save(AFTER).result()
        assert self._server.checkpoint_digest(AFTER) == self._server.checkpoint_digest(BEFORE)
        lease = self._critic._require_lease()
        assert self._post(valid_train(lease, after["critic_step"] + 1)).status_code == 200

    def close(self) -> None:
        self._critic.close()
        self._server.close()
