"""Maps each step to the weights version that samples it, and says what time staleness saves. Nothing else knows this rule."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Version k of the weights is the version after step k. Each step is sampled by the version that is exactly ``staleness``
    versions older than the newest one would be."""

    staleness: int
    last_step: int
    """The run's last step: no later one is sampled."""

    def version_of(self, step: int) -> int:
        """The version that samples ``step``; the first steps share version 0."""
        return max(0, step - 1 - self.staleness)

    def steps_of(self, version: int) -> range:
        """The steps that ``version`` samples."""
        first = version + self.staleness + 1 if version else 1
        return range(first, min(version + self.staleness + 1, self.last_step) + 1)

    def prefetched_after(self, step: int) -> range:
        """The steps after ``step`` that versions before ``step`` sample, also steps after the last, as if the run continued."""
        return range(step + 1, step + 1 + self.staleness) if step else range(0)

    def needed_after(self, step: int) -> range:
        """The versions that sample a step after ``step``, or may if the run continues; up to version ``step``."""
        return range(self.version_of(step + 1), step + 1)

    def done_with(self, step: int) -> range:
        """The version whose last step is ``step``, if there is one: a range of at most one version."""
        return range(self.version_of(step), self.version_of(step + 1))


def overlap(rollout: float, training: float, engines: int) -> str:
    """Say which part of a step staleness hides, from the seconds of both parts; ``engines`` is 0 if the trainer samples. The
    sentence begins without a capital letter."""
    parts = ("the rollout", "training") if rollout >= training else ("training", "the rollout")
    longest, whole = f"{max(rollout, training):.3g} s", f"{rollout + training:.3g} s"
    if engines:
        lasts = f"{whole} with algorithm.staleness=0, and {longest} with 1 or more"
    else:
        lasts = (
            f"{whole} while the trainer samples, and {longest} with engines as fast and algorithm.staleness=1 or more"
        )
    return f"{parts[0]} is the longer part: a step lasts {lasts}, which hides {parts[1]} behind {parts[0]}."
