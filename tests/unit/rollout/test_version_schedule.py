"""Every step is sampled once, by the version that its staleness names, and checkpoints hold what later steps need."""

import pytest

from nemo_style_rlhf.rollout.version_schedule import Schedule, overlap

STEPS = 12
EVERY = [Schedule(staleness, STEPS) for staleness in (0, 1, 2, 5, 20)]


@pytest.mark.parametrize("schedule", EVERY, ids=lambda schedule: schedule.staleness)
def test_the_versions_sample_every_step_once_in_order(schedule):
    sampled = [(version, step) for version in range(STEPS) for step in schedule.steps_of(version)]
    assert [step for _, step in sampled] == list(range(1, STEPS + 1))
    assert all(
        version == max(0, step - 1 - schedule.staleness) == schedule.version_of(step) for version, step in sampled
    )
    assert not schedule.steps_of(STEPS)


@pytest.mark.parametrize("schedule", EVERY, ids=lambda schedule: schedule.staleness)
def test_after_a_step_nothing_is_missing_that_its_own_version_does_not_sample(schedule):
    longer = Schedule(schedule.staleness, 10 * STEPS)
    for step in range(1, STEPS + 1):
        ahead, own = list(schedule.prefetched_after(step)), list(longer.steps_of(step))
        assert ahead + own == list(range(step + 1, step + 2 + schedule.staleness))
        versions = {schedule.version_of(each) for each in ahead} | {step}
        assert (
            versions <= set(schedule.needed_after(step)) and len(schedule.needed_after(step)) <= schedule.staleness + 1
        )


@pytest.mark.parametrize("schedule", EVERY, ids=lambda schedule: schedule.staleness)
def test_a_version_is_done_with_at_its_last_step_and_needed_until_then(schedule):
    longer = Schedule(schedule.staleness, 10 * STEPS)
    for step in range(1, STEPS + 1):
        done = [version for version in range(STEPS) if longer.steps_of(version)[-1] == step]
        assert list(schedule.done_with(step)) == done
        assert [*done, *schedule.needed_after(step)] == [*schedule.needed_after(step - 1), step]


def test_after_no_step_the_first_version_samples_all():
    schedule = Schedule(3, STEPS)
    assert (
        list(schedule.steps_of(0)) == [1, 2, 3, 4]
        and not schedule.prefetched_after(0)
        and list(schedule.needed_after(0)) == [0]
    )


def test_a_step_lasts_as_long_as_both_parts_or_as_the_longer():
    assert overlap(3.0, 5.0, 2) == (
        "training is the longer part: a step lasts 8 s with algorithm.staleness=0, and 5 s with 1 or more, "
        "which hides the rollout behind training."
    )
    assert overlap(5.0, 3.0, 0) == (
        "the rollout is the longer part: a step lasts 8 s while the trainer samples, and 5 s with engines as fast and "
        "algorithm.staleness=1 or more, which hides training behind the rollout."
    )
