"""What every server answers: its status, and the rewards of texts where it serves a reward model. No network."""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from nemo_style_rlhf.critic_service import protocol, validation
from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.identity import Identity
from nemo_style_rlhf.critic_service.protocol import Array, Code, ProtocolError
from nemo_style_rlhf.critic_service.reward_model import RewardModel, Score
from nemo_style_rlhf.critic_service.worker_group import WorkerGroup
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.data.templates import read_template
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.loading import load_reward_model, load_tokenizer
from nemo_style_rlhf.schema.reward_server import RewardServerProcessConfig

Tensors = dict[str, Array]


class Service:
    """:meth:`handle` takes named arrays and returns named arrays; it may be called from many threads.

    One lock serialises everything that touches the models; ``critic_status`` does not need it. As it stands it is the
    reward-only server; ``CriticService`` adds the critic's endpoints.
    """

    def __init__(
        self, identity: Identity, reward: RewardModel | None, group: WorkerGroup, *, max_request_bytes: int
    ) -> None:
        self.boot_id = secrets.token_hex(8)
        self.shutdown_requested = threading.Event()
        self.dismiss: Callable[[], None] = lambda: None
        """Lets other ranks end, too; nothing is computed after it."""
        self.abandon: Callable[[], None] = lambda: None
        """Lets the running call end before it is done."""
        self.roles: list[str] = []
        self._handlers: dict[str, Callable[[Mapping[str, Array]], Tensors]] = {protocol.STATUS.name: self._status}
        self._limits = protocol.Limits(identity.vocab_size, identity.max_length, max_request_bytes)
        self._identity = identity
        self._group = group
        self._refusing = threading.Event()
        self._model_lock = threading.Lock()
        self._working = [self._model_lock]
        """Held while a call must not be cut off, in the order in which calls take them."""
        self._busy: tuple[str, float] | None = None
        if reward is not None:
            self._reward = reward
            self.roles.append("reward")
            self._handlers[protocol.REWARD_INFER.name] = self._reward_infer

    def handle(self, endpoint: str, inputs: Mapping[str, Array]) -> Tensors:
        """Answer one request to an endpoint of :attr:`roles`.

        Raises:
            ProtocolError: the request was refused and changed nothing.
            Exception: anything else is a fault of this process, which must not go on.
        """
        return self._handlers[endpoint](inputs)

    def status(self) -> protocol.Status:
        busy = self._busy
        return protocol.Status(
            protocol_version=protocol.PROTOCOL_VERSION,
            boot_id=self.boot_id,
            roles=self.roles,
            **asdict(self._identity),
            max_request_bytes=self._limits.max_request_bytes,
            max_staged_bytes=0,
            critic_step=0,
            last_committed=None,
            lease_holder=None,
            busy=f"{busy[0]} for {time.monotonic() - busy[1]:.1f} s" if busy else None,
        )

    def _status(self, _: Mapping[str, Array]) -> Tensors:
        return {protocol.RESPONSE.name: protocol.bytes_tensor(self.status().to_json())}

    def _reward_infer(self, inputs: Mapping[str, Array]) -> Tensors:
        request = validation.read_reward(inputs, self._limits)
        texts = zip(request.prompts, request.responses, strict=True)
        token_ids = partial(self._reward.text.token_ids, rendered=request.rendered)
        sequences = [token_ids(prompt, response) for prompt, response in texts]
        tokenised = validation.read_tokenised(sequences, self._limits)
        with self._models(f"scoring of {len(sequences)} texts"):
            return {protocol.REWARDS.name: self._group.run(Score(tokenised))}

    # --- who may touch the models -------------------------------------------------------------------------------------

    @contextmanager
    def _models(self, what: str) -> Iterator[None]:
        """Hold the models; refused once the server is stopping."""
        self._require_open()
        with self._model_lock:
            self._require_open()
            self._busy = what, time.monotonic()
            try:
                yield
            except Exception as error:
                if not isinstance(error, ProtocolError) or error.fatal:
                    self._refusing.set()  # what waits must not compute with models that are half way through a step
                raise
            finally:
                self._busy = None

    def _require_open(self) -> None:
        if self._refusing.is_set():
            raise ProtocolError(Code.STOPPING, "the server is stopping")

    def stop(self, grace_s: float) -> bool:
        """Refuse new work and wait for the running call; False when it had to be abandoned after ``grace_s`` seconds."""
        self._refusing.set()
        deadline = time.monotonic() + grace_s
        finished = all([lock.acquire(timeout=max(0.0, deadline - time.monotonic())) for lock in self._working])
        self.abandon()
        return finished


def load_reward_service(config: RewardServerProcessConfig, device: torch.device, _: Path) -> Service:
    """The reward-only server.

    Raises:
        UserError: the checkpoint is missing or is no reward model with one label, or there are several ranks.
    """
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"a reward server is one rank, WORLD_SIZE is {ranks}: start several servers instead")
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    model = load_reward_model(config.model, normalize=config.reward.normalize_rewards)
    identity = Identity.of(
        model,
        tokenizer,
        path=config.model.path,
        max_length=config.reward.max_length,
        decisive={
            "reward": asdict(config.reward),
            "dtype": config.model.dtype,
            "templates": read_template(config.model.path),
        },
    )
    batches = Batches(
        micro_batch_tokens=config.reward.micro_batch_tokens,
        row_multiple=config.reward.row_multiple,
        pad_token_id=model.hf.config.pad_token_id,
        device=device,
    )
    text = RewardText(config.model.path, tokenizer, append_eos=config.reward.append_eos)
    group = WorkerGroup()
    reward = RewardModel(model, text, batches, group)
    return Service(identity, reward, group, max_request_bytes=config.server.max_request_bytes)
