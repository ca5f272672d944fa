"""Batches in the order of their steps, each sampled by the version of the weights that the schedule names.

A version brings its work with it: to be loaded, to be validated, and the steps that it samples. In-process generation does
that work in the trainer's thread, at the latest before the next version arrives. With engines, a thread of the first rank
does it, beside training; unless the trainer shares their devices in turn, when its own thread does it once it is their turn.
The order is the same, so the batches are.
"""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from nemo_style_rlhf.data.prompts import Prompt
from nemo_style_rlhf.distributed.ranks import Ranks
from nemo_style_rlhf.engines.pool import CallAbandoned, EnginePool
from nemo_style_rlhf.generation.interface import Generator, WeightUpdate
from nemo_style_rlhf.generation.weight_store import WeightStore
from nemo_style_rlhf.rollout.ahead import Ahead, Packed, pack, unpack
from nemo_style_rlhf.rollout.producer import Producer, Timers
from nemo_style_rlhf.rollout.schedule import Schedule
from nemo_style_rlhf.rollout.types import Batch
from nemo_style_rlhf.scoring.futures import InlineExecutor, resolved

Metrics = dict[str, float]


class BatchQueue:
    """Every rank makes the same calls."""

    def __init__(
        self,
        producer: Producer | None,
        generator: Generator | None,
        *,
        schedule: Schedule,
        prompts: Mapping[int, Prompt],
        validate: Callable[[Producer, int], Metrics],
        store: WeightStore | None,
        beside: bool,
        ranks: Ranks,
        turns: bool = False,
    ) -> None:
        """
        Args:
            producer: samples with ``generator``. Both are None on ranks that receive what the first one makes.
            prompts: training prompts by id.
            validate: samples validation prompts from the weights of a version, and returns metrics.
            store: for engines, and for versions that checkpoints must hold; None except on the first rank.
            beside: whether the first rank makes batches for all, beside training.
            turns: whether nothing is sampled, and no weights are loaded, except between :meth:`wake` and :meth:`sleep`.
        """
        self._producer, self._generator, self.schedule = producer, generator, schedule
        self._prompts, self._validate, self._store, self._ranks = prompts, validate, store, ranks
        self._engines = generator if isinstance(generator, EnginePool) else None
        self._shared, self._turns = beside, turns
        self._thread = ThreadPoolExecutor(1, "rollouts") if beside and not turns else None
        self._works = producer is not None
        self._timers = Timers()
        self._beside: dict[str, float] = {}
        self._last_end = perf_counter()
        self._awake = not turns
        self._start(0, 0)

    def _start(self, step: int, position: int) -> None:
        self._life = object()
        """Tasks of an earlier life end unfinished."""
        self._deferred: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._batches: dict[int, Future[Batch]] = {}
        self._validations: dict[int, Future[Metrics]] = {}
        self._owed: set[int] = set()
        self._restored = step
        self._held: tuple[Any, Future[float]] | None = None
        """In turns: the newest version, and the gap on its probe."""
        self._newest: Future[Batch] | int = position
        """The last batch that was asked for, or the number of prompts taken before the first."""

    # --- for the trainer ----------------------------------------------------------------------------------------------

    def publish(self, update: WeightUpdate, timers: Timers, *, validate: bool) -> None:
        """Let a version sample its steps, once those of the versions before it are sampled.

        Args:
            update: of the version that follows the last one. It is read before this returns.
            timers: charged with what in-process generation still has to sample.

        Raises:
            TransferError: the generator did not load the version (in-process generation; else :meth:`batch` raises it).
            StorageError: it could not be stored.
        """
        version, self._timers = update.version, timers
        if self._thread is None:
            self._run()
        if self._store is not None:
            self._store.keep(self.schedule.needed_after(version))
        loaded = self._load(update)
        if self._thread is None and not self._turns:
            self._run(loaded)
            loaded.result()
        self._give_work(version, loaded, validate=validate or version in self._owed)

    def batch(self, step: int, timers: Timers) -> Batch:
        """The batch of ``step``, whose scores may be pending.

        Raises:
            Exception: what went wrong when it was made.
        """
        self._timers = timers
        future = self._batches.pop(step)
        self._run(future)
        if not self._shared:
            return future.result()

        def made() -> Packed | None:
            batch = future.result()
            return pack(batch) if self._ranks.size > 1 else None

        packed = self._ranks.on_first(made)
        timers.lap("wait_for_rollout")
        scores = InlineExecutor().submit(lambda: self._ranks.on_first(lambda: future.result().scores.result()))
        if self._works:
            return replace(future.result(), scores=scores)
        assert packed is not None
        return unpack(packed, scores, self._prompts)

    def clock_metrics(self) -> dict[str, float]:
        """Metrics that the clock alone decides, on the first rank. `timers/beside_*` are the seconds that the last batch took to
        sample, and those for which the engines had waited for work before it; `engines/*` describe the engines, and `clock/*` the
        episodes of the last batch."""
        engines = {} if self._engines is None else self._engines.metrics
        engines |= {} if self._producer is None else self._producer.clock_metrics
        return engines | {f"timers/beside_{phase}": seconds for phase, seconds in self._beside.items()}

    def owes_validation(self, version: int) -> bool:
        """Whether the validation of ``version`` was asked for, and its metrics were not."""
        return version in self._validations

    def validation(self, version: int) -> Metrics:
        """The metrics of a validation; asked for once."""
        future = self._validations.pop(version)
        self._run(future)
        return self._ranks.on_first(future.result) if self._shared else future.result()

    @property
    def stores_weights(self) -> bool:
        """Whether this rank writes published weights into files."""
        return self._store is not None

    def sleep(self) -> dict[str, int]:
        """Have the generator free its devices; returns :meth:`Generator.sleep`'s."""
        self._awake = False
        return {} if self._generator is None else self._generator.sleep()

    def wake(self) -> None:
        """Have the generator hold the newest version, again if it did before it slept."""
        if self._awake or self._generator is None:
            return
        assert self._held is not None
        weights, loaded = self._held
        gap = self._generator.load(weights)
        self._awake = True
        if not loaded.done():
            loaded.set_result(gap)

    def ahead(self, step: int) -> Ahead:
        """Collect, on the first rank and without waiting, what a checkpoint of ``step`` must hold."""
        if not self._ranks.is_first:
            return Ahead()
        steps = list(self.schedule.ahead_of(step))
        batches: list[Batch] = []
        while len(batches) < len(steps) and (batch := self._whole(steps[len(batches)])) is not None:
            batches.append(batch)
        validations = {version: _known(future) for version, future in sorted(self._validations.items())}
        versions = {self.schedule.version_of(missing) for missing in steps[len(batches) :]}
        versions |= {version for version, metrics in validations.items() if metrics is None}
        pinned = [self._store.pinned(version) for version in sorted(versions - {step})] if self._store else []
        return Ahead(batches, validations, pinned, self._store)

    def abandon(self) -> None:
        """Forget everything under way; :meth:`restore` comes next, or :meth:`close`."""
        self._life = object()
        if self._engines is not None:
            self._engines.abandon()

    def restore(self, step: int, position: int, folder: Path) -> None:
        """Stand where a checkpoint stood.

        Args:
            position: number of prompts taken up to ``step``.
            folder: with what :meth:`ahead` returned there; it need not exist.
        """
        self.abandon()
        if self._thread is not None:
            self._thread.submit(lambda: None).result()  # what it was doing has ended
        if self._engines is not None:
            self._engines.resume()
        self._start(step, position)
        if self._store is not None:
            self._store.keep([])
        ahead = Ahead.load(folder, self._prompts)
        for batch in ahead.batches:
            self._newest = self._batches[batch.step] = resolved(batch)
        self._owed = {version for version, metrics in ahead.validations.items() if metrics is None}
        self._validations = {
            version: resolved(known) for version, known in ahead.validations.items() if known is not None
        }
        for weights in ahead.weights:
            self._give_work(weights.version, self._load(weights), validate=weights.version in self._owed)

    def close(self) -> None:
        self.abandon()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._producer is not None:
            self._producer.close()
        if self._generator is not None:
            self._generator.close()
        if self._store is not None:
            self._store.close()

    # --- work ---------------------------------------------------------------------------------------------------------

    def _load(self, update: WeightUpdate) -> "Future[float]":
        """Store ``update`` where it has to be, and have it loaded; resolves to the gap on the probe."""
        store = self._store
        if self._thread is None and not self._turns:
            whole = update if store is None else store.written(update)
            return self._submit(lambda: self._generator.load(whole))  # type: ignore[union-attr]

        def write() -> Any:
            if store is not None:
                return store.publish(update)
            for _ in update.buckets():  # the ranks gather the weights together
                pass

        stored = self._ranks.everyone(write)[0]
        if self._turns:
            self._held = stored, Future()
            return self._held[1]
        return self._submit(lambda: self._generator.load(stored))  # type: ignore[union-attr]

    def _give_work(self, version: int, loaded: "Future[float]", *, validate: bool) -> None:
        if validate:
            self._validations[version] = self._submit(lambda: self._validated(version, loaded))
        for step in self.schedule.steps_of(version):
            if step > self._restored and step not in self._batches:
                made = self._submit(self._making(step, version, loaded, self._newest))
                self._newest = self._batches[step] = made

    def _validated(self, version: int, loaded: "Future[float]") -> Metrics:
        loaded.result()
        assert self._producer is not None
        return self._validate(self._producer, version)

    def _making(
        self, step: int, version: int, loaded: "Future[float]", before: "Future[Batch] | int"
    ) -> Callable[[], Batch]:
        def make() -> Batch:
            gap, position = loaded.result(), before if isinstance(before, int) else before.result().data_end
            assert self._producer is not None
            began = perf_counter()
            timers = self._timers if self._thread is None else Timers()
            batch = self._producer.batch(step, position, version, timers)
            if self._thread is not None:
                ended = perf_counter()
                self._beside = {"sampling": ended - began, "idle": began - self._last_end}
                self._last_end = ended
            if self._thread is None and self.schedule.staleness:
                batch.scores.result()
                timers.lap("wait_for_scores")
            return replace(batch, probe_gap=gap)

        return make

    def _submit(self, work: Callable[[], Any]) -> "Future[Any]":
        life = self._life

        def task() -> Any:
            if self._life is not life:
                raise CallAbandoned
            return work()

        if not self._works:
            return Future()
        if self._thread is not None:
            return self._thread.submit(task)
        future: Future[Any] = Future()
        self._deferred.append((future, task))
        return future

    def _run(self, until: "Future[Any] | None" = None) -> None:
        """Do deferred work in order, until ``until`` is done, or all of it."""
        while self._deferred and not (until is not None and until.done()):
            future, task = self._deferred.popleft()
            try:
                future.set_result(task())
            except BaseException as error:  # noqa: BLE001 raised to whoever asks for the result
                future.set_exception(error)

    def _whole(self, step: int) -> Batch | None:
        future = self._batches.get(step)
        batch = None if future is None else _known(future)
        return None if batch is None or _known(batch.scores) is None else batch


def _known(future: "Future[Any]") -> Any:
    """The result, if there is one by now."""
    return future.result() if future.done() and future.exception() is None else None
