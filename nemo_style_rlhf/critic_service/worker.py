"""The models of the critic process and their computations, independent of leases, requests and the network."""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.value_loss import ValueLoss, value_loss
from nemo_style_rlhf.critic_service.batches import Batches
from nemo_style_rlhf.critic_service.identity import Identity
from nemo_style_rlhf.critic_service.protocol import InferRequest, TrainPlan
from nemo_style_rlhf.critic_service.reward_model import RewardModel
from nemo_style_rlhf.critic_service.worker_group import RankMessage, WorkerGroup
from nemo_style_rlhf.data.ragged import unpad
from nemo_style_rlhf.data.reward_text import RewardText
from nemo_style_rlhf.data.sampling import mixed_seed
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.engine.export import export_engine
from nemo_style_rlhf.engine.memory_use import give_back, held_bytes, memory
from nemo_style_rlhf.engine.snapshot import Snapshot
from nemo_style_rlhf.engine.steps import OptimizerStep, TokenMeans, optimizer_steps
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.models.compiled import compile_forward
from nemo_style_rlhf.models.digests import module_digest, tokenizer_digest
from nemo_style_rlhf.models.kinds import refuse_encoder
from nemo_style_rlhf.models.loading import load_tokenizer
from nemo_style_rlhf.models.lora import add_lora
from nemo_style_rlhf.models.scalar import PooledModel, ScalarModel, pad_token
from nemo_style_rlhf.models.scalar_loading import load_reward_model, starting_critic
from nemo_style_rlhf.schema.common import row_multiple
from nemo_style_rlhf.schema.critic import PPOCriticConfig
from nemo_style_rlhf.wire.messages import Array, unragged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Infer(RankMessage[Array]):
    """Compute values float32 [N] per state of the sequences that a rank answers for; 0 for others."""

    request: InferRequest
    micro_batches: list[tuple[list[int], bool]]
    """As in :class:`Share`."""


@dataclass(frozen=True)
class Train(RankMessage["_Totals"]):
    """Take the optimizer steps of a train step on this rank's micro-batches. Raises as :meth:`CriticWorker.train`."""

    request: InferRequest
    returns: Array
    """float32 [N], aligned with ``request.tokens``, as are the next two."""
    old_values: Array
    mask: Array
    steps: list[list[tuple[list[int], bool]]]
    """As in :class:`Share`."""
    normalizers: list[float]
    step: int
    """Number of the train step. Dropout is a function of it, so that a restored critic needs no generator state."""


@dataclass(frozen=True)
class TakeSnapshot(RankMessage[None]):
    """Copy the critic's state in memory, for the files of a checkpoint."""


@dataclass(frozen=True)
class BeginFiles(RankMessage[None]):
    """Start to write each rank's files of the snapshot. Other messages may come meanwhile."""

    directory: Path
    """A directory that all ranks see."""


@dataclass(frozen=True)
class EndFiles(RankMessage[BaseException | None]):
    """Wait until the rank has written; the result says why it could not."""


@dataclass(frozen=True)
class Sleep(RankMessage[int]):
    """Move all models to host memory. The result is the bytes that the first rank still holds."""


@dataclass(frozen=True)
class Wake(RankMessage[int]):
    """Move the critic's weights back to the device. Its optimizer follows when it trains, the reward model when it is asked.
    Result as in :class:`Sleep`."""


@dataclass(frozen=True)
class LoadCheckpoint(RankMessage[None]):
    directory: Path


@dataclass(frozen=True)
class Export(RankMessage[None]):
    """Write the critic as a Hugging Face directory, of the class that its config.json names."""

    directory: Path


class Abandoned(Exception):
    """The process was told to stop in the middle of a train step; the step counts as not applied."""


class CriticWorker:
    """The trained critic, the frozen reward model, or both. Not thread-safe: one message at a time.

    The ranks of :attr:`group` share the micro-batches.
    """

    def __init__(self, config: PPOCriticConfig, device: torch.device, *, should_stop: Callable[[], bool]) -> None:
        """Load the reward model, if it is served, and the model from which the critic starts, if there is one.

        Args:
            should_stop: called between the micro-batches of a train step. No message carries it: each rank has its own, and
                only the first rank's ever returns True.

        Raises:
            UserError: a checkpoint is missing or unsuitable.
        """
        self.config = config
        self.has_critic = config.value_model.enabled
        self.group = WorkerGroup()
        self.group.join(
            {
                Infer: self._infer,
                Train: self._train,
                TakeSnapshot: self._take_snapshot,
                BeginFiles: self._begin_files,
                EndFiles: self._end_files,
                Sleep: self._sleep,
                Wake: self._wake,
                LoadCheckpoint: self._load,
                Export: self._export,
            }
        )
        self.reward: RewardModel | None = None
        self._start = config.critic_start
        self.tokenizer = load_tokenizer(self._start.path, trust_remote_code=config.model.trust_remote_code)
        served, text = self._served_reward_model() or (None, None)
        critic = starting_critic(config) if self.has_critic else None
        models = [model for model in (served, critic) if model is not None]
        self.identity = Identity.of(
            models,
            self.tokenizer,
            path=config.model.path,
            reads_conversations=text is not None and text.reads_conversations,
            max_length=config.server.max_length,
            decisive=_decisive(config),
        )
        self.batches = Batches(
            micro_batch_tokens=config.engine.micro_batch_tokens,
            row_multiple=row_multiple(config.engine.row_multiple, device.type),
            pad_token_id=pad_token(models[-1].hf),
            device=device,
            ranks=self.group.size,
        )
        if served is not None and text is not None:
            offload = config.reward_model.offload_reward_model
            if config.model.compile and config.engine.zero_stage < 3:
                compile_forward(served)
            self.reward = RewardModel(served, text, self.batches, self.group, offload=offload, engine=config.engine)
        self._should_stop = should_stop
        if critic is None:
            return
        self.start_digest = module_digest(critic)
        """SHA-256 over the weights from which the critic starts."""
        add_lora(critic.hf, self._start)
        self.trained = sum(parameter.numel() for parameter in critic.parameters() if parameter.requires_grad)
        """Parameters that learn."""
        if config.model.gradient_checkpointing:
            critic.hf.gradient_checkpointing_enable()
        if config.model.compile:
            compile_forward(critic)
        self.engine = Engine(critic, config.engine, device=device)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._snapshot = Snapshot()
        self._files: Future[None] = Future()
        self.engine.eval()

    def _served_reward_model(self) -> tuple[ScalarModel, RewardText] | None:
        """The reward model, on the CPU, and how it reads texts, if this process is to serve one.

        Raises:
            UserError: it gives no score per token, or its tokenizer is not the critic's.
        """
        config, path = self.config.reward_model, self.config.model.path
        if not config.combine_rm_and_critic_server:
            return None
        model = load_reward_model(
            self.config.model, normalize=config.normalize_rewards, label_weights=config.label_weights
        )
        if isinstance(model, PooledModel):
            refuse_encoder(path, type(model.hf).__name__)
        # Not the critic's tokenizer: its chat template may differ.
        tokenizer = load_tokenizer(path, trust_remote_code=self.config.model.trust_remote_code)
        if tokenizer_digest(tokenizer) != tokenizer_digest(self.tokenizer):
            raise UserError(
                f"value_model.path={self.config.value_model.path} and the reward model {path} have different tokenizers: serve "
                "the reward model with servers/serve_reward_model.py, which reads text, and set "
                "reward_model.combine_rm_and_critic_server=false"
            )
        return model, RewardText(path, tokenizer, append_eos=config.append_eos)

    def values(self, request: InferRequest) -> Array:
        """On the first rank: values float32 [N] per state."""
        shares = self.batches.shares(request.lengths)
        answers = self.group.run_each([Infer(share.of(request), share.steps[0]) for share in shares])
        offsets, values = request.offsets, np.zeros(len(request.tokens), dtype=np.float32)
        for share, answer in zip(shares, answers, strict=True):
            of_rows = unragged(answer, request.lengths[share.rows])
            for place in share.counted:
                row = share.rows[place]
                values[offsets[row] : offsets[row + 1]] = of_rows[place]
        return values

    def train(
        self, request: InferRequest, returns: Array, old_values: Array, mask: Array, plan: TrainPlan, step: int
    ) -> dict[str, float]:
        """On the first rank: take one train step, an optimizer step with the clipped value loss for every mini-batch of ``plan``.

        Args:
            returns, old_values, mask: float32 [N], aligned with ``request.tokens``.
            step: number of the train step.

        Returns:
            Metrics, means over the optimizer steps; ``tokens`` counts unmasked tokens, ``explained_variance`` uses the values
            each token had just before the optimizer step that used it.

        Raises:
            NonFiniteError: the loss or gradient is NaN or infinite: the weights in memory are lost, checkpoints are not.
            Abandoned: ``should_stop`` of the first rank returned True.
        """
        started = time.monotonic()
        messages = [
            Train(
                share.of(request), share.pick(returns, request), share.pick(old_values, request), share.pick(mask, request),
                share.steps, plan.normalizers, step,
            )
            for share in self.batches.shares(request.lengths, plan.mini_batches)
        ]  # fmt: skip
        totals = _Totals.of(self.group.run_each(messages))
        metrics = totals.metrics(seconds=time.monotonic() - started)
        log.info(
            "train step %d: %d sequences in %.3g s, loss %.4g, explained variance %.3g", step, len(request.lengths),
            metrics["seconds"], metrics["loss"], metrics["explained_variance"],
        )  # fmt: skip
        return metrics

    @torch.no_grad()
    def _infer(self, message: Infer) -> Array:
        request = message.request
        self.engine.eval()
        lengths, offsets = request.lengths.tolist(), request.offsets
        values = torch.zeros(len(request.tokens))
        for rows, counts in message.micro_batches:
            token_values = self.engine(*self.batches.inputs(request, rows)).cpu()
            if counts:
                places = [torch.arange(offsets[row], offsets[row + 1]) for row in rows]
                values[torch.cat(places)] = unpad(token_values, [lengths[row] for row in rows])
        return values.numpy()

    def _train(self, message: Train) -> "_Totals":
        if self.reward is not None:
            self.reward.rest()
        request = message.request
        arrays = message.old_values, message.returns, message.mask
        totals = _Totals()

        def loss(number: int, rows: list[int], counts: bool) -> Tensor:
            if self._should_stop():
                raise Abandoned
            values = self.engine(*self.batches.inputs(request, rows))
            old, target, weight = (self.batches.padded(array, request, rows) for array in arrays)
            if not counts:
                weight = torch.zeros_like(weight)
            clip, normalizer = self.config.value_model.loss_clip_val, message.normalizers[number]
            result = value_loss(values, old, target, weight, clip=clip, normalizer=normalizer)
            if counts:
                totals.add(result, values.detach(), target, weight)
            return result.loss

        seed = mixed_seed(self.config.run.seed, message.step, self.group.rank)
        totals.steps = optimizer_steps(self.engine, message.steps, loss, seed=seed)
        return totals

    def _take_snapshot(self, _: TakeSnapshot) -> None:
        self._snapshot = Snapshot()  # frees the snapshot of a save that never wrote its files
        self._snapshot = self.engine.snapshot()

    def _begin_files(self, message: BeginFiles) -> None:
        self._files = self._writer.submit(self._snapshot.write, message.directory)
        self._snapshot = Snapshot()

    def wait_for_files(self) -> None:
        """Return when this rank has written."""
        wait([self._files])

    def _end_files(self, _: EndFiles) -> BaseException | None:
        return self._files.exception()

    def _sleep(self, _: Sleep) -> int:
        if self.reward is not None:
            self.reward.sleep()
        if self.has_critic:
            self.engine.offload()
        give_back(self.batches.device)
        return held_bytes()

    def _wake(self, _: Wake) -> int:
        if self.has_critic:
            self.engine.offload(keep_weights=True)
        return held_bytes()

    def _load(self, message: LoadCheckpoint) -> None:
        self.engine.load(message.directory)

    def _export(self, message: Export) -> None:
        export_engine(self.engine, self.group, message.directory, self._start)


class _Totals:
    """The sums behind the metrics of a train step; per-token sums in float64."""

    def __init__(self) -> None:
        self.steps: list[OptimizerStep] = []
        self._means = TokenMeans()
        self._values: list[Tensor] = []
        self._returns: list[Tensor] = []

    def add(self, result: ValueLoss, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        counted = mask.bool()
        self._means.add(int(counted.sum()), clip_fraction=result.clip_fraction)
        self._values.append(values[counted].double().cpu())
        self._returns.append(returns[counted].double().cpu())

    @staticmethod
    def of(shards: "list[_Totals]") -> "_Totals":
        """The combined totals of all ranks."""
        whole = _Totals()
        whole._means = TokenMeans.of([shard._means for shard in shards])
        for steps in zip(*(shard.steps for shard in shards), strict=True):
            whole.steps.append(replace(steps[0], losses=[sum(step.losses) for step in steps]))
        for shard in shards:
            whole._values += shard._values
            whole._returns += shard._returns
        return whole

    def metrics(self, *, seconds: float) -> dict[str, float]:
        values, returns = torch.cat(self._values), torch.cat(self._returns)
        spread = float(returns.var(correction=0))
        residual = float((returns - values).var(correction=0))
        return {
            "loss": math.fsum(sum(step.losses) for step in self.steps) / len(self.steps),
            "grad_norm": math.fsum(step.grad_norm for step in self.steps) / len(self.steps),
            "lr": self.steps[-1].lr,
            "clip_fraction": self._means.mean("clip_fraction"),
            "explained_variance": 1 - residual / spread if spread > 0 else 0.0,
            "values_mean": float(values.mean()),
            "returns_mean": float(returns.mean()),
            "optimizer_steps": float(len(self.steps)),
            "tokens": float(len(values)),
            "seconds": seconds,
            **memory(),
        }


def _decisive(config: PPOCriticConfig) -> dict[str, Any]:
    """Everything in the config that decides the critic's numbers."""
    return {
        "loss_clip_val": config.value_model.loss_clip_val,
        "normalize_rewards": config.reward_model.normalize_rewards,
        "engine": asdict(config.engine),
        "lora": asdict(config.model.lora),
        "dtype": config.model.dtype,
        "disable_dropout": config.model.disable_dropout,
        "seed": config.run.seed,
    }
