"""Which devices the parts of a run use, and when."""

from dataclasses import dataclass

from nemo_style_rlhf.schema.base import setting

GENERATE, SCORE, TRAIN = "generate", "score", "train"
"""The phases of a step, each of which has the devices for itself with share=turns (ppo/residency.py)."""


@dataclass
class PlacementConfig:
    """Whether generation, critic and trainer share devices."""

    share: str = setting("none", among=("none", "turns"))
    """none: each part keeps its memory. turns: one set of devices in turn, see docs/one-gpu.md. Generation, then the critic with
    the log-probabilities, then the trainer have the devices to themselves, and the others leave them. The bits are the same."""

    @property
    def in_turns(self) -> bool:
        return self.share == "turns"
