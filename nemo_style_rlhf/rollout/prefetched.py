"""Batches as tensors and plain data: sent to other ranks, and saved in checkpoints if they are prefetched."""

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.generation.interface import SampleId
from nemo_style_rlhf.generation.weight_store import PublishedWeights, WeightStore
from nemo_style_rlhf.rollout.types import Batch, Rollout, Turn
from nemo_style_rlhf.schema.chat import Chat
from nemo_style_rlhf.scoring.futures import resolved
from nemo_style_rlhf.scoring.interface import Scores

VALIDATIONS = "validations.json"
EXTRA = "extra/"
Packed = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors of a batch, and what is JSON."""


def pack(batch: Batch) -> Packed:
    """A batch without its scores and the texts of its prompts."""
    tensors, described = pack_rollouts(batch.rollouts)
    described |= {
        "step": batch.step,
        "data_end": batch.data_end,
        "counts": batch.counts,
        "probe_gap": batch.probe_gap,
    }
    return tensors, described


def unpack(packed: Packed, scores: "Future[Scores]", prompts: Mapping[int, Prompt]) -> Batch:
    described, rollouts = packed[1], unpack_rollouts(packed, prompts)
    return Batch(
        described["step"], rollouts, scores, described["data_end"], described["counts"], described["probe_gap"]
    )


def pack_rollouts(rollouts: Sequence[Rollout]) -> Packed:
    def of_all(per_rollout: list[Tensor]) -> Tensor:
        return torch.cat(per_rollout) if per_rollout else torch.empty(0)

    tensors = {
        "tokens": of_all([rollout.tokens for rollout in rollouts]),
        "response_mask": of_all([rollout.response_mask for rollout in rollouts]),
        "sampler_logprobs": of_all([rollout.sampler_logprobs for rollout in rollouts]),
        "weights_version": of_all([rollout.weights_version for rollout in rollouts]),
    }
    described = {
        "rollouts": [
            {
                "sample": [rollout.sample.step, rollout.sample.prompt_id, rollout.sample.index],
                "seed": rollout.seed,
                "length": len(rollout.tokens),
                "turns": [[turn.start, turn.end, turn.finish_reason, turn.reward] for turn in rollout.turns],
                "max_length": rollout.max_length,
                "status": rollout.status,
                "branch": rollout.branch,
                "began_with": rollout.began_with,
                "asked": None if rollout.asked is None else rollout.asked.to_json(),
                "observed": rollout.observed,
            }
            for rollout in rollouts
        ],
    }
    return tensors, described


def unpack_rollouts(packed: Packed, prompts: Mapping[int, Prompt]) -> list[Rollout]:
    tensors, described = packed
    lengths = [each["length"] for each in described["rollouts"]]
    parts = (
        tensors[name].split(lengths) for name in ("tokens", "response_mask", "sampler_logprobs", "weights_version")
    )
    rollouts = []
    for each, tokens, response_mask, logprobs, version in zip(described["rollouts"], *parts, strict=True):
        sample = SampleId(*each["sample"])
        rollouts.append(
            Rollout(
                sample=sample,
                seed=each["seed"],
                prompt=prompts[sample.prompt_id],
                tokens=tokens,
                response_mask=response_mask,
                sampler_logprobs=logprobs,
                weights_version=version,
                turns=tuple(Turn(*turn) for turn in each["turns"]),
                max_length=each["max_length"],
                status=each["status"],
                branch=each["branch"],
                began_with=each["began_with"],
                asked=None if (asked := each.get("asked")) is None else Chat.from_json(asked),
                observed=each.get("observed"),
            )
        )
    return rollouts


@dataclass
class Prefetched:
    """The part of a checkpoint that later steps need from older versions of the weights: samples, or the weights themselves."""

    batches: list[Batch] = field(default_factory=list)
    """Whole batches of consecutive steps, with their scores."""
    validations: dict[int, dict[str, float] | None] = field(default_factory=dict)
    """Metrics of validations that are not written yet, by version; None if they are not known yet."""
    weights: list[PublishedWeights] = field(default_factory=list)
    """The versions, in order, that make the rest again."""
    store: WeightStore | None = None
    """Holds ``weights`` until :meth:`release`."""

    def save(self, folder: Path) -> None:
        if not (self.batches or self.validations or self.weights):
            return
        folder.mkdir()
        for batch in self.batches:
            tensors, described = pack(batch)
            scores = batch.scores.result()
            tensors |= {"rewards": scores.rewards, "failed": scores.failures}
            tensors |= {} if scores.filter_scores is None else {"filter_scores": scores.filter_scores}
            tensors |= {EXTRA + name: values for name, values in scores.extra.items()}
            save_file(tensors, _batch_file(folder, batch.step), {"batch": json.dumps(described)})
        (folder / VALIDATIONS).write_text(json.dumps({str(key): value for key, value in self.validations.items()}))
        for weights in self.weights:
            shutil.copytree(weights.folder, folder / f"weights_{weights.version:06d}")

    def release(self) -> None:
        if self.store is not None:
            for weights in self.weights:
                self.store.unpin(weights.version)

    @staticmethod
    def load(folder: Path, prompts: Mapping[int, Prompt]) -> "Prefetched":
        """Read what :meth:`save` wrote; an absent folder holds nothing."""
        if not folder.is_dir():
            return Prefetched()
        validations = json.loads((folder / VALIDATIONS).read_text())
        return Prefetched(
            [_load_batch(path, prompts) for path in sorted(folder.glob("batch_*.safetensors"))],
            {int(version): metrics for version, metrics in validations.items()},
            [PublishedWeights.open(path) for path in sorted(folder.glob("weights_*"))],
        )


def _load_batch(path: Path, prompts: Mapping[int, Prompt]) -> Batch:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
        described = json.loads(file.metadata()["batch"])
    scores = Scores(
        rewards=tensors["rewards"],
        filter_scores=tensors.get("filter_scores"),
        extra={name.removeprefix(EXTRA): values for name, values in tensors.items() if name.startswith(EXTRA)},
        failed=tensors["failed"],
    )
    return unpack((tensors, described), resolved(scores), prompts)


def _batch_file(folder: Path, step: int) -> Path:
    return folder / f"batch_{step:06d}.safetensors"
