"""Turns on a shared device: who sleeps and wakes when, and what is said if a phase does not fit."""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engine.memory_use import GIB
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.ppo import residency
from nemo_style_rlhf.ppo.residency import Memory, Needs, Residency
from nemo_style_rlhf.schema.actor import PPOActorConfig
from nemo_style_rlhf.schema.base import build
from nemo_style_rlhf.schema.placement import GENERATE, SCORE, TRAIN


class Parts:
    """Engine, queue and critic at once: notes what they are told, and how much each then holds of a device of 10 GiB."""

    device = torch.device("cuda")  # only its name is looked at

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.holds = {"queue": 0, "engine": 0, "critic": 6}
        self.others = 0
        monkeypatch.setattr(residency, "held_bytes", lambda: self.holds["engine"] * GIB)
        monkeypatch.setattr(Memory, "now", lambda _: Memory(self.used, 10 * GIB - self.used))

    @property
    def used(self) -> int:
        return (sum(self.holds.values()) + self.others) * GIB

    def residency(self, *, in_turns: bool = True, ranks: Ranks | None = None) -> Residency:
        engine, queue, critic = Part(self, "engine", 5), Part(self, "queue", 7), Part(self, "critic", 6)
        engine.device = self.device
        return Residency(engine, queue, critic, ranks or Ranks(), in_turns=in_turns)


class Part:
    def __init__(self, parts: Parts, name: str, size: int) -> None:
        self.parts, self.name, self.size = parts, name, size

    def _holds(self, size: int, told: str) -> int:
        if self.parts.holds[self.name] != size:
            self.parts.holds[self.name] = size
            self.parts.told.append(f"{self.name} {told}")
        return size * GIB

    def sleep(self):
        held = self._holds(0, "sleeps")
        return held if self.name == "critic" else {}

    def wake(self) -> int:
        return self._holds(self.size, "wakes")

    def offload(self, *, keep_weights: bool = False) -> None:
        self._holds(2 if keep_weights else 0, "keeps its weights" if keep_weights else "sleeps")

    def reload(self) -> None:
        self._holds(self.size, "wakes")

    def hold(self) -> None: ...

    def release(self) -> None:
        self.parts.told.append("inference begins")


def test_one_phase_has_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    turns = parts.residency()
    for phase in (GENERATE, GENERATE, SCORE, TRAIN):
        turns.enter(phase)
        assert parts.used <= 8 * GIB
    assert parts.told == [
        "critic sleeps", "queue wakes", "queue sleeps", "engine keeps its weights", "critic wakes", "inference begins",
        "critic sleeps", "engine wakes",
    ]  # fmt: skip
    found = turns.clock_metrics()
    assert found["placement/peak_gib"] == 8 and found["placement/moved_gib"] == 6 + 7 + 6
    assert turns.clock_metrics()["placement/moved_gib"] == 0


def test_a_phase_that_no_longer_fits_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    turns = parts.residency()
    for phase in (GENERATE, SCORE, TRAIN):
        turns.enter(phase)
    parts.others = 4
    told = len(parts.told)
    with pytest.raises(
        UserError,
        match=r"generate \(the engines: .*\) took 7.00 GiB in an earlier turn but 6.00 GiB are free, while 4.00 GiB are in use "
        r"\(critic server 0.00 GiB, trainer 0.00 GiB\): end what else runs there",
    ):
        turns.enter(GENERATE)
    assert parts.told[told:] == ["engine sleeps"]


class Two(Ranks):
    """The first of two ranks, whose other one always agrees."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def everyone(self, compute):
        return [compute()] * 2


def test_the_first_of_several_ranks_may_be_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for scores between the rounds of a filter, while the others wait: its critic is then no stranger on the device."""
    parts = Parts(monkeypatch)
    turns = parts.residency(ranks=Two())
    for _ in range(2):
        for enter, phase in (
            (turns.enter, GENERATE), (turns.enter_alone, SCORE), (turns.enter_alone, GENERATE), (turns.enter_alone, SCORE),
            (turns.enter, SCORE), (turns.enter, TRAIN),
        ):  # fmt: skip
            enter(phase)
            assert parts.used <= 8 * GIB


def test_a_phase_is_judged_by_the_most_that_it_took() -> None:
    needs = Needs()
    needs.check(TRAIN, Memory(0, 0), {})  # nothing is known yet
    needs.note(TRAIN, before=Memory(GIB, 0), after=Memory(3 * GIB, 0))
    needs.note(TRAIN, before=Memory(GIB, 0), after=Memory(2 * GIB, 0))
    needs.check(TRAIN, Memory(0, 2 * GIB), {})
    with pytest.raises(UserError, match=r"took 2\.00 GiB"):
        needs.check(TRAIN, Memory(0, 2 * GIB - 1), {})


def test_without_turns_everybody_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    turns = parts.residency(in_turns=False)
    for phase in (GENERATE, SCORE, TRAIN):
        turns.enter(phase)
    turns.begin_again()
    assert parts.told == [] and turns.clock_metrics() == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["algorithm.staleness=1", "algorithm.correction.kind=tis"], "algorithm.staleness=1 samples beside training"),
        (["generation.engines.count=1", "generation.engines.weights=nccl"], "which NCCL refuses: use auto or gloo"),
        (["placement.share=rounds"], "placement.share=rounds is not possible: expected one of none, turns"),
    ],
)
def test_what_cannot_take_turns_is_refused(given: list[str], said: str) -> None:
    words = ["run.output_dir=x", "model.path=x", "data.train_path=x", "placement.share=turns", *given]
    with pytest.raises(UserError, match=said):
        build(PPOActorConfig, OmegaConf.from_dotlist(words))
