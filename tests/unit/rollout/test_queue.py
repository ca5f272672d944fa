"""Batches ahead: which version samples which, what a checkpoint holds of them, and where a restored queue goes on."""

import math
import threading
from concurrent.futures import Future
from itertools import product

import pytest
import torch

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.generation.interface import Completion, GenerationRequest, ProbeTarget, SampleId
from nemo_style_rlhf.generation.transfer import OwnWeights
from nemo_style_rlhf.generation.weight_store import WeightStore
from nemo_style_rlhf.rollout import executors
from nemo_style_rlhf.rollout.executors import InlineRollouts, ThreadedRollouts
from nemo_style_rlhf.rollout.prefetched import Prefetched, pack, unpack
from nemo_style_rlhf.rollout.producer import NothingToLearnError, Timers
from nemo_style_rlhf.rollout.queue import BatchQueue
from nemo_style_rlhf.rollout.types import Batch, Rollout
from nemo_style_rlhf.rollout.version_schedule import Schedule
from nemo_style_rlhf.scoring.futures import resolved
from nemo_style_rlhf.scoring.interface import Scores

PROMPTS = {index: Prompt(index, [index + 1] * (1 + index % 3), f"prompt {index}") for index in range(100)}
PER_STEP = 4
PROBE = ProbeTarget(((1, 2),), (torch.zeros(1),), 1.0)


def weights_of(version: int) -> OwnWeights:
    return OwnWeights(version, iter([("weight", torch.full((3,), float(version)))]), PROBE)


class Generator:
    """Holds weights, and waits with loading while ``closed``."""

    def __init__(self) -> None:
        self.loaded: list[float] = []
        self.open = threading.Event()
        self.open.set()

    def load(self, update) -> float:
        self.open.wait(10)
        for bucket in update.buckets():
            self.loaded += [float(tensor[0]) for _, tensor in bucket]
        return self.loaded[-1] / 100

    def sleep(self) -> dict[str, int]:
        self.loaded.append(math.nan)
        return {}

    def close(self) -> None: ...


class Producer:
    """Makes batches whose content says which weights made them."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.poisoned, self.late, self.clock_metrics = generator, -1, {}, {}

    def batch(self, step, position, version, timers) -> Batch:
        if step == self.poisoned:
            raise NothingToLearnError("nothing")
        rollouts = []
        for index in range(position, position + PER_STEP):
            prompt = PROMPTS[index]
            request = GenerationRequest(SampleId(step, index, 0), tuple(prompt.token_ids), step * 1000 + index, 9)
            tokens = [7, int(self.generator.loaded[-1]), index]
            rollouts.append(Rollout.from_completion(completion(request, tokens, version), prompt))
        rewards = torch.arange(PER_STEP, dtype=torch.float32) + step
        rewards[0] = torch.nan
        scores = Scores(rewards, extra={"source/metric": rewards * 2}, failed=rewards.isnan())
        return Batch(step, rollouts, self.late.get(step, resolved(scores)), position + PER_STEP, {"rounds": 1.0})

    def close(self) -> None: ...


def completion(request: GenerationRequest, tokens: list[int], version: int) -> Completion:
    return Completion(request, torch.tensor(tokens), -torch.rand(len(tokens)), "length", version)


class Run:
    """A queue, and a trainer that publishes a version after every step."""

    def __init__(self, folder, *, staleness: int, setup: str = "engines", last_step: int = 8) -> None:
        self.generator = Generator()
        self.producer = Producer(self.generator)
        self.queue = BatchQueue(
            self.producer, self.generator, schedule=Schedule(staleness, last_step), prompts=PROMPTS,
            executor=ThreadedRollouts if setup == "engines" else InlineRollouts,
            validate=lambda _, version: {"of": self.generator.loaded[-1], "version": version}, store=WeightStore(folder),
            from_store=setup != "in_process", ranks=Ranks(), receivers=Ranks(),
        )  # fmt: skip
        self.steps: dict[int, list[float]] = {}
        self.shares_time = setup == "time_sharing"
        if self.shares_time:
            self.queue.sleep()

    def publish(self, version: int, *, validate: bool = False) -> None:
        self.queue.publish(weights_of(version), Timers(), validate=validate)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.queue.wake()
            batch = self.queue.batch(step, Timers())
            if self.shares_time:
                self.queue.sleep()
            batch.scores.result()
            self.steps[step] = [
                float(batch.rollouts[0].tokens[-2]), batch.probe_gap, batch.rollouts[0].sample.prompt_id, batch.data_end,
            ]  # fmt: skip
            self.publish(step)


@pytest.mark.parametrize(("setup", "staleness"), [*product(["in_process", "engines"], [0, 1, 3]), ("time_sharing", 0)])
def test_each_step_is_sampled_by_its_version_from_its_prompts(tmp_path, setup, staleness):
    run = Run(tmp_path / "weights", staleness=staleness, setup=setup)
    run.publish(0)
    run.train(*range(1, 9))
    for step, (version, gap, first_prompt, data_end) in run.steps.items():
        assert version == max(0, step - 1 - staleness) and gap == version / 100
        assert (first_prompt, data_end) == ((step - 1) * PER_STEP, step * PER_STEP)
    assert {int(folder.name) for folder in (tmp_path / "weights").iterdir()} == set(range(8 - staleness, 9))
    run.queue.close()


@pytest.mark.parametrize(("setup", "staleness"), [("in_process", 2), ("engines", 2), ("time_sharing", 0)])
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_restored_queue_goes_on_where_the_checkpoint_stood(tmp_path, at, setup, staleness):
    """Also with a run that was to end at the checkpoint, and is extended: nothing was sampled ahead of it."""
    whole = Run(tmp_path / "whole", staleness=staleness, setup="in_process", last_step=12)
    whole.publish(0)
    whole.train(*range(1, 13))
    run = Run(tmp_path / "weights", staleness=staleness, setup=setup)
    run.publish(0)
    run.train(*range(1, at + 1))
    ahead = run.queue.prefetched(at)
    ahead.save(tmp_path / "ahead")
    ahead.release()
    run.queue.close()
    resumed = Run(tmp_path / "other", staleness=staleness, setup=setup, last_step=12)
    resumed.queue.restore(at, at * PER_STEP, tmp_path / "ahead")
    resumed.publish(at)
    resumed.train(*range(at + 1, 13))
    assert resumed.steps == {step: made for step, made in whole.steps.items() if step > at}
    resumed.queue.close()


def test_a_checkpoint_waits_for_nothing_and_holds_the_weights_of_what_is_missing(tmp_path):
    run = Run(tmp_path / "weights", staleness=2)
    run.producer.late[5] = Future()
    run.publish(0)
    run.train(1, 2)
    run.queue.batch(3, Timers())
    run.queue._batches[5].result()
    run.generator.open.clear()
    run.publish(3, validate=True)  # it waits for the generator
    ahead = run.queue.prefetched(3)
    assert [batch.step for batch in ahead.batches] == [4] and [each.version for each in ahead.weights] == [2]
    assert ahead.validations == {3: None}
    run.queue._store.keep([])  # type: ignore[union-attr] as when later versions come
    ahead.save(tmp_path / "ahead")
    ahead.release()
    run.generator.open.set()
    again = Run(tmp_path / "other", staleness=2)
    again.queue.restore(3, 3 * PER_STEP, tmp_path / "ahead")
    assert not again.queue.owes_validation(3)
    again.publish(3)
    assert again.queue.owes_validation(3) and again.queue.validation(3) == {"of": 3.0, "version": 3}
    again.train(4, 5, 6)
    assert [made[0] for made in again.steps.values()] == [1.0, 2.0, 3.0]
    for each in (run, again):
        each.queue.close()


def test_what_goes_wrong_in_a_later_step_is_raised_by_it_and_not_before(tmp_path):
    run = Run(tmp_path / "weights", staleness=1)
    run.producer.poisoned = 2
    run.publish(0)
    run.train(1)
    ahead = run.queue.prefetched(1)  # whether or not the step has failed by now
    assert not ahead.batches and [each.version for each in ahead.weights] == [0]
    with pytest.raises(NothingToLearnError):
        run.queue.batch(2, Timers())
    run.queue.close()


def test_tasks_of_an_abandoned_queue_end_before_it_is_restored_or_never_begin(tmp_path):
    run = Run(tmp_path / "weights", staleness=0)
    run.generator.open.clear()
    run.publish(0)
    threading.Timer(0.2, run.generator.open.set).start()
    made = run.queue._batches[1]
    run.queue.restore(0, PER_STEP, tmp_path / "nothing")
    assert run.generator.loaded == [0.0] and made.cancelled()
    run.publish(0)
    run.train(1)
    assert run.generator.loaded[:2] == [0.0, 0.0] and run.steps[1][2] == PER_STEP
    run.queue.close()


def test_a_generator_that_slept_holds_the_newest_weights_again(tmp_path):
    run = Run(tmp_path / "weights", staleness=0, setup="time_sharing")
    run.publish(0, validate=True)
    assert not run.generator.loaded[1:]
    for _ in range(2):
        run.queue.wake()
        run.queue.wake()
        assert run.generator.loaded[-1] == 0.0
        run.queue.sleep()
    run.queue.wake()
    assert run.queue.validation(0) == {"of": 0.0, "version": 0}
    assert [each for each in run.generator.loaded if each == 0.0] == [0.0] * 3
    run.queue.close()


def test_engines_are_idle_while_they_neither_load_nor_sample(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(executors, "perf_counter", lambda: clock[0])

    def takes(seconds: float, work):
        def timed(*args):
            clock[0] += seconds
            return work(*args)

        return timed

    run = Run(tmp_path / "weights", staleness=0, setup="engines")
    run.generator.load, run.producer.batch = takes(5.0, run.generator.load), takes(7.0, run.producer.batch)
    run.publish(0)
    run.queue.batch(1, Timers())
    clock[0] += 2.0
    run.publish(1)
    run.queue.batch(2, Timers())
    assert run.queue.clock_metrics() == {"timers/beside_sampling": 7.0, "timers/beside_idle": 2.0}
    run.queue.close()


def test_waiting_for_rewards_in_turn_has_its_own_timer(tmp_path):
    run, timers = Run(tmp_path / "weights", staleness=1, setup="in_process"), Timers()
    run.publish(0)
    run.queue.batch(1, timers)
    assert "wait_for_scores" in timers.seconds
    run.queue.close()


def test_a_batch_has_the_same_bits_after_it_was_a_file_or_a_message(tmp_path):
    generator = Generator()
    generator.loaded.append(4.0)
    batch = Producer(generator).batch(3, 8, 4, Timers())
    Prefetched(batches=[batch]).save(tmp_path / "ahead")
    (from_file,) = Prefetched.load(tmp_path / "ahead", PROMPTS).batches
    for other in (from_file, unpack(pack(batch), batch.scores, PROMPTS)):
        assert (other.step, other.data_end, other.counts, other.probe_gap) == (3, 12, {"rounds": 1.0}, 0.0)
        for left, right in zip(other.rollouts, batch.rollouts, strict=True):
            for name, value in vars(right).items():
                found = getattr(left, name)
                assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name
        left, right = other.scores.result(), batch.scores.result()
        assert torch.equal(left.rewards.nan_to_num(-1), right.rewards.nan_to_num(-1))
        assert torch.equal(left.failures, right.failures) and left.extra.keys() == right.extra.keys()
    assert Prefetched.load(tmp_path / "nothing", PROMPTS) == Prefetched()
