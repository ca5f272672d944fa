"""Batches in the order of their steps, each sampled by the version of the weights that :class:`Schedule` names.

The trainer publishes versions and takes batches. An executor does the tasks in between, one after the other (staleness 2):

    publish(1)              publish(2)                           publish(3)
        |                       |                                    |
        v                       v                                    v
    [load 1] [sample 4]     [load 2] [validate 2] [sample 5]     [load 3] [sample 6]
                 |                         |           |                       |
                 v                         v           v                       v
             batch(4)            validation(2)     batch(5)                batch(6)

    what                waits until
    publish(v)          version v is read: into files, or by "load v" itself
    load v              all tasks before it are done: they need the version before
    sample k            "load v" and "sample k - 1", after whose prompts it begins, are done; a filter also waits for scores
    batch(k)            "sample k" is done
    batch(k).scores     the reward sources have answered, while the executor does the next task

    set-up              executor            "load v" reads                    who samples
    in process          InlineRollouts      the trainer's tensors, at once    every rank its part, which all ranks gather
    engines             ThreadedRollouts    files of the store                the first rank, which sends batches to the others
    time sharing        InlineRollouts      files of the store, in wake()     as without time sharing

Every executor does the tasks in this order, so the batches are the same.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engines.pool import EnginePool
from nemo_style_rlhf.generation.interface import Generator, WeightUpdate
from nemo_style_rlhf.generation.weight_store import WeightStore
from nemo_style_rlhf.rollout.executors import InlineRollouts, ThreadedRollouts
from nemo_style_rlhf.rollout.prefetched import Prefetched, pack, unpack
from nemo_style_rlhf.rollout.producer import Producer, Timers
from nemo_style_rlhf.rollout.types import Batch
from nemo_style_rlhf.rollout.version_schedule import Schedule
from nemo_style_rlhf.scoring.futures import InlineExecutor, mapped, resolved

Metrics = dict[str, float]


class BatchQueue:
    """Every rank makes the same calls."""

    def __init__(
        self,
        producer: Producer | None,
        generator: Generator | None,
        *,
        executor: type[InlineRollouts | ThreadedRollouts],
        schedule: Schedule,
        prompts: Mapping[int, Prompt],
        validate: Callable[[Producer, int], Metrics],
        store: WeightStore | None,
        from_store: bool,
        ranks: Ranks,
        receivers: Ranks,
    ) -> None:
        """``producer`` samples with ``generator``. Both are None on ranks that receive what the first one makes.

        Args:
            executor: runs the tasks; each :meth:`restore` begins with a new one.
            prompts: training prompts by id.
            validate: samples validation prompts from the weights of a version, and returns metrics.
            store: for generators that load from it, and for versions that checkpoints must hold; None except on the first rank.
            from_store: whether the generator loads a version from ``store``, some time after :meth:`publish` has returned.
            receivers: the ranks that get what the first of them makes; only this rank if each has a producer.
        """
        self._producer, self._generator, self._new_executor = producer, generator, executor
        self.schedule, self._prompts, self._validate = schedule, prompts, validate
        self._store, self._from_store, self._ranks, self._receivers = store, from_store, ranks, receivers
        self._engines = generator if isinstance(generator, EnginePool) else None
        self._timers = Timers()
        self._asleep = False
        self._start(0, 0)

    def _start(self, step: int, position: int) -> None:
        self._executor = self._new_executor()
        self._batches: dict[int, Future[Batch]] = {}
        self._validations: dict[int, Future[Metrics]] = {}
        self._owed: set[int] = set()
        self._restored = step
        self._stored: tuple[WeightUpdate, Future[float]] | None = None
        """The newest version in the store, and the gap on its probe."""
        self._data_end = resolved(position)
        """Number of prompts taken up to the last batch that was asked for."""

    # --- for the trainer ----------------------------------------------------------------------------------------------

    def publish(self, update: WeightUpdate, timers: Timers, *, validate: bool) -> None:
        """Let a version sample its steps, once the steps of the versions before it are sampled.

        Args:
            update: the version after the last one. It is read before this returns.
            timers: charged with what in-process generation still has to sample.

        Raises:
            TransferError: the generator did not load the version (in-process generation; else :meth:`batch` raises it).
            StorageError: it could not be stored.
        """
        version, self._timers = update.version, timers
        if self._store is not None:
            self._store.keep(self.schedule.needed_after(version))
        self._submit_work(version, self._load(update), validate=validate or version in self._owed)

    def batch(self, step: int, timers: Timers) -> Batch:
        """The batch of ``step``, whose scores may be pending.

        Raises:
            Exception: the error raised while it was made.
        """
        self._timers = timers
        made = self._batches.pop(step)
        batch = made.result() if self._receivers.size == 1 else self._received(made)
        if self._engines is not None:
            timers.lap("wait_for_rollout")
        return batch

    def clock_metrics(self) -> dict[str, float]:
        """Metrics that depend only on the clock, on the first rank. `timers/beside_*` are the seconds that the last batch took to
        sample, and those for which the engines had waited for work before it; `engines/*` describe the engines, and `clock/*` the
        episodes of the last batch."""
        engines = {} if self._engines is None else self._engines.metrics
        engines |= {} if self._producer is None else self._producer.clock_metrics
        return engines | {f"timers/beside_{phase}": seconds for phase, seconds in self._executor.seconds.items()}

    def owes_validation(self, version: int) -> bool:
        """True if the validation of ``version`` was asked for, and its metrics were not."""
        return version in self._validations

    def validation(self, version: int) -> Metrics:
        """The metrics of a validation; asked for once."""
        return self._receivers.on_first(self._validations.pop(version).result)

    @property
    def stores_weights(self) -> bool:
        """True if this rank writes published weights into files."""
        return self._store is not None

    def sleep(self) -> dict[str, int]:
        """Make the generator free its devices; returns :meth:`Generator.sleep`'s result."""
        self._asleep = True
        return {} if self._generator is None else self._generator.sleep()

    def wake(self) -> None:
        """Make the generator hold the newest version, again if it did before it slept."""
        if not self._asleep or self._generator is None:
            return
        assert self._stored is not None
        weights, loaded = self._stored
        again = loaded.done()
        loaded.result()
        if again:
            self._generator.load(weights)
        self._asleep = False

    def prefetched(self, step: int) -> Prefetched:
        """Collect, on the first rank and without waiting, what a checkpoint of ``step`` must hold of later steps."""
        if not self._ranks.is_first:
            return Prefetched()
        steps = list(self.schedule.prefetched_after(step))
        batches: list[Batch] = []
        while len(batches) < len(steps) and (batch := self._whole(steps[len(batches)])) is not None:
            batches.append(batch)
        validations = {version: _known(future) for version, future in sorted(self._validations.items())}
        versions = {self.schedule.version_of(missing) for missing in steps[len(batches) :]}
        versions |= {version for version, metrics in validations.items() if metrics is None}
        pinned = [self._store.pinned(version) for version in sorted(versions - {step})] if self._store else []
        return Prefetched(batches, validations, pinned, self._store)

    def abandon(self) -> None:
        """Forget everything under way; :meth:`restore` comes next, or :meth:`close`."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._engines is not None:
            self._engines.abandon()

    def restore(self, step: int, position: int, folder: Path) -> None:
        """Return to the state of a checkpoint.

        Args:
            position: number of prompts taken up to ``step``.
            folder: holds what :meth:`prefetched` returned there; it need not exist.
        """
        self.abandon()
        self._executor.shutdown()  # waits for the task under way
        if self._engines is not None:
            self._engines.resume()
        self._start(step, position)
        if self._store is not None:
            self._store.keep([])
        prefetched = Prefetched.load(folder, self._prompts)
        for batch in prefetched.batches:
            self._batches[batch.step], self._data_end = resolved(batch), resolved(batch.data_end)
        known = {version: metrics for version, metrics in prefetched.validations.items() if metrics is not None}
        self._owed = prefetched.validations.keys() - known.keys()
        self._validations = {version: resolved(metrics) for version, metrics in known.items()}
        for weights in prefetched.weights:
            self._submit_work(weights.version, self._load(weights), validate=weights.version in self._owed)

    def close(self) -> None:
        self.abandon()
        for part in (self._producer, self._generator, self._store):
            if part is not None:
                part.close()

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _submit(self, task: Callable[..., Any], *args: Any) -> "Future[Any]":
        """A future of ``task(*args)``. It never resolves on ranks that leave the work to the first one."""
        return Future() if self._producer is None else self._executor.submit(task, *args)

    def _load(self, update: WeightUpdate) -> "Future[float]":
        """Read ``update`` and let the generator load it; resolves to the gap on the probe."""
        if self._from_store:
            stored = self._ranks.everyone(lambda: self._write(update))[0]
            loaded = self._submit(self._load_task, stored)
            self._stored = stored, loaded
        else:
            loaded = self._submit(self._load_task, update if self._store is None else self._store.written(update))
            loaded.result()
        return loaded

    def _write(self, update: WeightUpdate) -> Any:
        """Write ``update`` into files, on the first rank."""
        if self._store is not None:
            return self._store.publish(update)
        for _ in update.buckets():  # the ranks gather the weights together
            pass
        return None

    def _submit_work(self, version: int, loaded: "Future[float]", *, validate: bool) -> None:
        if validate:
            self._validations[version] = self._submit(self._validation_task, version, loaded)
        for step in self.schedule.steps_of(version):
            if step > self._restored and step not in self._batches:
                made = self._submit(self._batch_task, step, version, loaded, self._data_end)
                self._batches[step], self._data_end = made, mapped(made, lambda batch: batch.data_end)

    def _load_task(self, weights: WeightUpdate) -> float:
        assert self._generator is not None
        return self._generator.load(weights)

    def _validation_task(self, version: int, loaded: "Future[float]") -> Metrics:
        loaded.result()
        assert self._producer is not None
        return self._validate(self._producer, version)

    def _batch_task(self, step: int, version: int, loaded: "Future[float]", data_end: "Future[int]") -> Batch:
        gap, position, producer = loaded.result(), data_end.result(), self._producer
        assert producer is not None
        make, prefetched = partial(producer.batch, step, position, version), self.schedule.staleness > 0
        batch = self._executor.sample(make, self._timers, prefetched=prefetched)
        return replace(batch, probe_gap=gap)

    # --- results ------------------------------------------------------------------------------------------------------

    def _received(self, made: "Future[Batch]") -> Batch:
        """The batch of the first rank, on every rank. Its scores follow when every rank asks for them."""
        ranks = self._receivers
        packed = ranks.on_first(lambda: pack(made.result()))
        scores = InlineExecutor().submit(lambda: ranks.on_first(lambda: made.result().scores.result()))
        return replace(made.result(), scores=scores) if ranks.is_first else unpack(packed, scores, self._prompts)

    def _whole(self, step: int) -> Batch | None:
        batch = _known(self._batches[step]) if step in self._batches else None
        return None if batch is None or _known(batch.scores) is None else batch


def _known(future: "Future[Any]") -> Any:
    """The result, if there is one by now."""
    return future.result() if future.done() and not future.cancelled() and future.exception() is None else None
