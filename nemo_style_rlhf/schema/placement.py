"""Sharing of devices among the parts of a run."""

from dataclasses import dataclass

from nemo_style_rlhf.schema.base import setting

GENERATE, SCORE, TRAIN = "generate", "score", "train"
"""The phases of a step. With share=turns each has the devices for itself (ppo/residency.py)."""


@dataclass
class PlacementConfig:
    """Device sharing of generation, critic and trainer."""

    share: str = setting("none", among=("none", "turns"))
    """none: each part keeps its memory. turns: time sharing (docs/one-gpu.md): generation, then the critic with the
    log-probabilities, then the trainer have the devices to themselves, and the others leave them. The bits are the same."""

    @property
    def in_turns(self) -> bool:
        return self.share == "turns"
