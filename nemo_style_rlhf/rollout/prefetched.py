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
PER_TOKEN = "tokens", "response_mask", "sampler_logprobs", "weights_version"
"""Fields of a rollout that are tensors [L]."""
PLAIN = "seed", "max_length", "status", "branch", "began_with", "observed"
"""Fields of a rollout that JSON holds as they are."""
Packed = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors of a batch, and its JSON part."""


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
    tensors = {
        name: torch.cat([getattr(rollout, name) for rollout in rollouts]) if rollouts else torch.empty(0)
        for name in PER_TOKEN
    }
    described = [
        {
            **{name: getattr(rollout, name) for name in PLAIN},
            "sample": [rollout.sample.step, rollout.sample.prompt_id, rollout.sample.index],
            "length": len(rollout.tokens),
            "turns": [[turn.start, turn.end, turn.finish_reason, turn.reward] for turn in rollout.turns],
            "asked": None if rollout.asked is None else rollout.asked.to_json(),
        }
        for rollout in rollouts
    ]
    return tensors, {"rollouts": described}


def unpack_rollouts(packed: Packed, prompts: Mapping[int, Prompt]) -> list[Rollout]:
    tensors, described = packed
    lengths = [each["length"] for each in described["rollouts"]]
    per_token = zip(*(tensors[name].split(lengths) for name in PER_TOKEN), strict=True)
    rollouts = []
    for each, parts in zip(described["rollouts"], per_token, strict=True):
        sample, fields = SampleId(*each["sample"]), dict[str, Any](zip(PER_TOKEN, parts, strict=True))
        rollouts.append(
            Rollout(
                sample=sample,
                prompt=prompts[sample.prompt_id],
                turns=tuple(Turn(*turn) for turn in each["turns"]),
                asked=None if each["asked"] is None else Chat.from_json(each["asked"]),
                **fields,
                **{name: each[name] for name in PLAIN},
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
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is not a dict
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
