"""The models of the critic process and what is computed with them; knows no lease, no request, no network."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nemo_style_rlhf.algorithms.value_loss import ValueLoss, value_loss
from nemo_style_rlhf.critic_service.protocol import Array, InferRequest, TrainPlan
from nemo_style_rlhf.critic_service.reward_text import RewardText
from nemo_style_rlhf.data.ragged import micro_batches, pad, round_up, unpad
from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.models.digests import module_digest, tokenizer_digest
from nemo_style_rlhf.models.loading import load_reward_model, load_tokenizer, original_dropout
from nemo_style_rlhf.models.scalar import ScalarModel, sequence_scores
from nemo_style_rlhf.schema.critic import PPOCriticConfig

MAX_LENGTH_WITHOUT_A_LIMIT = 2**20


class Abandoned(Exception):
    """The process was told to stop in the middle of a train step; the step counts as not applied."""


class CriticWorker:
    """The trained critic, the frozen reward model and their tokenizer. Not thread-safe: one caller at a time."""

    def __init__(self, config: PPOCriticConfig, device: torch.device) -> None:
        """Load the reward model, and once more as the critic.

        Raises:
            UserError: the checkpoint is missing or is no reward model with one label.
        """
        self.config = config
        self.device = device
        self.tokenizer = load_tokenizer(config.model.path)
        self.reward_text = RewardText(config.model.path, self.tokenizer, append_eos=config.critic.append_eos)
        critic = load_reward_model(config.model)
        self.model_digest = module_digest(critic)
        self.reward_model: ScalarModel | None = None
        if config.critic.combine_rm_and_critic_server:
            self.reward_model = load_reward_model(config.model).requires_grad_(False).eval()
            if not config.critic.offload_reward_model:
                self.reward_model.to(device)
        hf_config = critic.hf.config
        self.pad_token_id: int | None = hf_config.pad_token_id
        self.vocab_size = critic.hf.get_input_embeddings().num_embeddings
        self.max_length = _max_length(config.critic.max_length, getattr(hf_config, "max_position_embeddings", None))
        if config.model.gradient_checkpointing:
            critic.hf.gradient_checkpointing_enable()
        if config.model.compile:
            critic.compile(dynamic=True)
        self.engine = Engine(critic, config.engine, device=device)
        self.engine.offload_optimizer()

    def tokenizer_digest(self) -> str:
        return tokenizer_digest(self.tokenizer)

    def config_digest(self) -> str:
        """SHA-256 over everything in the config that decides the critic's numbers."""
        decisive = {
            "loss_clip_val": self.config.critic.loss_clip_val,
            "engine": asdict(self.config.engine),
            "dtype": self.config.model.dtype,
            "disable_dropout": self.config.model.disable_dropout,
            "seed": self.config.run.seed,
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    @torch.no_grad()
    def infer(self, request: InferRequest) -> tuple[Array, Array | None]:
        """Values float32 [N] per state and, where a reward model is served, rewards float32 [B]."""
        self.engine.eval()
        lengths = request.lengths.tolist()
        offsets = request.offsets
        values = np.empty(len(request.tokens), dtype=np.float32)
        rewards = np.empty(len(lengths), dtype=np.float32) if self.reward_model is not None else None
        with self._reward_model_on_device():
            for rows in micro_batches(lengths, token_budget=self.config.engine.micro_batch_tokens):
                batch = self._inputs(request, rows)
                token_values = unpad(self.engine(*batch).cpu(), [lengths[row] for row in rows]).numpy()
                start = 0
                for row in rows:
                    values[offsets[row] : offsets[row + 1]] = token_values[start : start + lengths[row]]
                    start += lengths[row]
                if rewards is not None:
                    rewards[rows] = self._rewards(*batch, [lengths[row] for row in rows])
        return values, rewards

    @torch.no_grad()
    def score(self, request: InferRequest) -> Array:
        """Rewards float32 [B], the same bits as :meth:`infer`'s; a reward model must be served."""
        lengths = request.lengths.tolist()
        rewards = np.empty(len(lengths), dtype=np.float32)
        with self._reward_model_on_device():
            for rows in micro_batches(lengths, token_budget=self.config.engine.micro_batch_tokens):
                rewards[rows] = self._rewards(*self._inputs(request, rows), [lengths[row] for row in rows])
        return rewards

    def train(
        self,
        request: InferRequest,
        returns: Array,
        old_values: Array,
        mask: Array,
        plan: TrainPlan,
        *,
        should_stop: Callable[[], bool],
    ) -> dict[str, float]:
        """One train step: an optimizer step with the clipped value loss for every mini-batch of ``plan``.

        Args:
            returns, old_values, mask: float32 [N], aligned with ``request.tokens``.
            should_stop: asked between micro-batches.

        Returns:
            Metrics, means over the optimizer steps; ``tokens`` counts unmasked tokens, ``explained_variance`` is that of the
            values each token had just before the optimizer step that used it.

        Raises:
            NonFiniteError: the loss or gradient is NaN or infinite: the weights in memory are lost, checkpoints are not.
            Abandoned: ``should_stop`` said so.
        """
        started = time.monotonic()
        self.engine.reload_optimizer()
        self.engine.train()
        lengths = request.lengths.tolist()
        total = _Totals()
        for rows, normalizer in zip(plan.mini_batches, plan.normalizers, strict=True):
            mini_lengths = [lengths[row] for row in rows]
            loss = 0.0
            for picks in micro_batches(mini_lengths, token_budget=self.config.engine.micro_batch_tokens):
                if should_stop():
                    raise Abandoned
                micro = [rows[pick] for pick in picks]
                values = self.engine(*self._inputs(request, micro))
                old, target, weight = (self._padded(array, request, micro) for array in (old_values, returns, mask))
                result = value_loss(
                    values, old, target, weight, clip=self.config.critic.loss_clip_val, normalizer=normalizer
                )
                self.engine.backward(result.loss)
                loss += result.loss.item()
                total.add(result, values.detach(), target, weight)
            stats = self.engine.step()
            total.losses.append(loss)
            total.grad_norms.append(stats.grad_norm)
            total.lr = stats.lr
        self.engine.eval()
        self.engine.offload_optimizer()
        return total.metrics(seconds=time.monotonic() - started)

    def digest(self) -> str:
        """SHA-256 over the critic's weights and optimizer state."""
        return self.engine.digest()

    def save(self, directory: Path) -> None:
        self.engine.save(directory)
        self.engine.offload_optimizer()

    def load(self, directory: Path) -> None:
        self.engine.load(directory)
        self.engine.offload_optimizer()

    def export(self, directory: Path) -> None:
        """Write the critic as a Hugging Face directory that AutoModelForSequenceClassification loads."""
        prefix = "hf."
        weights = {name.removeprefix(prefix): tensor.cpu() for name, tensor in self.engine.named_weights()}
        hf = self.engine.module.hf
        dropout_off = {key: getattr(hf.config, key) for key in original_dropout(self.config.model.path)}
        for key, value in original_dropout(self.config.model.path).items():
            setattr(hf.config, key, value)
        try:
            hf.save_pretrained(directory, state_dict=weights)
        finally:
            for key, value in dropout_off.items():
                setattr(hf.config, key, value)
        self.tokenizer.save_pretrained(directory)

    def _inputs(self, request: InferRequest, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask [rows rounded up, T] of the sequences ``rows``, on the device."""
        lengths = request.lengths[rows].tolist()
        padded_rows = round_up(len(rows), self.config.engine.row_multiple)
        flat = torch.from_numpy(_pick(request.tokens, request, rows).astype(np.int64))
        fill = self.pad_token_id if self.pad_token_id is not None else 0
        token_ids = pad(flat, lengths, value=fill, rows=padded_rows)
        # A row without any attended token would be NaN in some attention kernels: added rows attend to their first.
        visible = torch.tensor(lengths + [1] * (padded_rows - len(rows)))
        attention_mask = (torch.arange(token_ids.shape[1]) < visible[:, None]).long()
        return token_ids.to(self.device), attention_mask.to(self.device)

    def _rewards(self, token_ids: Tensor, attention_mask: Tensor, lengths: list[int]) -> Array:
        """float32 [len(lengths)] of a micro-batch, whose rows beyond ``lengths`` are padding."""
        assert self.reward_model is not None
        rows = len(lengths)
        scores = self.reward_model(token_ids, attention_mask)[:rows]
        row_lengths = torch.tensor(lengths, device=self.device)
        pooled: Array = sequence_scores(scores, token_ids[:rows], row_lengths, self.pad_token_id).cpu().numpy()
        return pooled

    def _padded(self, array: Array, request: InferRequest, rows: Sequence[int]) -> Tensor:
        """float32 [rows rounded up, T], 0 where there is no token."""
        padded_rows = round_up(len(rows), self.config.engine.row_multiple)
        flat = torch.from_numpy(_pick(array, request, rows))
        return pad(flat, request.lengths[rows].tolist(), rows=padded_rows).to(self.device)

    @contextmanager
    def _reward_model_on_device(self) -> Iterator[None]:
        if self.reward_model is None or not self.config.critic.offload_reward_model:
            yield
            return
        self.reward_model.to(self.device)
        try:
            yield
        finally:
            self.reward_model.to("cpu")


class _Totals:
    """What the metrics of a train step are made of; per-token sums in float64."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.lr = 0.0
        self._clipped = 0.0
        self._values: list[Tensor] = []
        self._returns: list[Tensor] = []

    def add(self, result: ValueLoss, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        counted = mask.bool()
        self._clipped += float(result.clip_fraction) * int(counted.sum())
        self._values.append(values[counted].double().cpu())
        self._returns.append(returns[counted].double().cpu())

    def metrics(self, *, seconds: float) -> dict[str, float]:
        values, returns = torch.cat(self._values), torch.cat(self._returns)
        spread = float(returns.var(correction=0))
        residual = float((returns - values).var(correction=0))
        return {
            "loss": math.fsum(self.losses) / len(self.losses),
            "grad_norm": math.fsum(self.grad_norms) / len(self.grad_norms),
            "lr": self.lr,
            "clip_fraction": self._clipped / len(values),
            "explained_variance": 1 - residual / spread if spread > 0 else 0.0,
            "values_mean": float(values.mean()),
            "returns_mean": float(returns.mean()),
            "optimizer_steps": float(len(self.losses)),
            "tokens": float(len(values)),
            "seconds": seconds,
        }


def _pick(array: Array, request: InferRequest, rows: Sequence[int]) -> Array:
    """The entries of the sequences ``rows``, end to end."""
    offsets = request.offsets
    return np.concatenate([array[offsets[row] : offsets[row + 1]] for row in rows])


def _max_length(configured: int, of_model: int | None) -> int:
    if configured and of_model:
        return min(configured, of_model)
    return configured or of_model or MAX_LENGTH_WITHOUT_A_LIMIT
