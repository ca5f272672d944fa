"""Answers about runs: their list and states, their metrics, events, steps and configurations.

Each answer is a function of this page's :class:`Sources`, so that an exported report holds the same answers.
"""

from collections.abc import Sequence
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.tracking.metrics import EVENTS_FILE, METRICS_FILE
from nemo_style_rlhf.watch.configs import differing, starts
from nemo_style_rlhf.watch.handlers import Api
from nemo_style_rlhf.watch.metrics import MOST_POINTS, Cursor, Logs, by_metric
from nemo_style_rlhf.watch.runs import Runs
from nemo_style_rlhf.watch.state import States

LAST_STEPS = 30
"""Steps in an answer about the timeline, unless another number is asked for."""
MOST_STEPS = 500


class Sources:
    """Runs, and the data read from them."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.logs = Logs()
        self._states = States(self.logs)

    def list(self) -> dict[str, Any]:
        return {"runs": [self._states.of(run) for run in self.runs.all()]}

    def metrics(self, run_id: str, after: str, *, most: int = MOST_POINTS) -> dict[str, Any]:
        """Points of every metric since ``after``; ``reset`` if the reader must discard the points it has."""
        try:
            known = Cursor.parse(after) if after else Cursor()
        except ValueError as error:
            raise UserError("after is no cursor: give the one of the last answer") from error
        rows, cursor = self.logs(self.runs.get(run_id).folder / METRICS_FILE).since(known)
        return {"cursor": str(cursor), "reset": cursor.life != known.life, "metrics": by_metric(rows, most=most)}

    def events(self, run_id: str) -> dict[str, Any]:
        return {"events": self.logs(self.runs.get(run_id).folder / EVENTS_FILE).rows()}

    def steps(self, run_id: str, last: int, until: int | None = None) -> dict[str, Any]:
        """The ``last`` whole lines of training steps, up to step ``until``, and the first and the last step that there are."""
        rows = self.logs(self.runs.get(run_id).folder / METRICS_FILE).rows()
        trained = [row for row in rows if "timers/step" in row]
        shown = [row for row in trained if until is None or row["step"] <= until]
        ends = [trained[0]["step"], trained[-1]["step"]] if trained else None
        return {"rows": shown[-min(max(last, 1), MOST_STEPS) :], "ends": ends}

    def config(self, run_ids: Sequence[str]) -> dict[str, Any]:
        """The keys in which several runs differ, or what the starts of one have changed."""
        runs = [self.runs.get(run_id) for run_id in run_ids]
        return {"differing": differing(runs), "starts": [starts(run.folder) for run in runs]}


class FromSources(Api):
    @property
    def sources(self) -> Sources:
        sources: Sources = self.settings["sources"]
        return sources


class RunList(FromSources):
    """``/api/runs``."""

    async def get(self) -> None:
        await self.reply(self.sources.list)


class Metrics(FromSources):
    """``/api/run/<id>/metrics?after=<cursor>&most=<points of a metric>``."""

    async def get(self, run_id: str) -> None:
        after, most = self.get_query_argument("after", ""), self.number("most", MOST_POINTS)
        await self.reply(lambda: self.sources.metrics(run_id, after, most=min(max(most, 2), MOST_POINTS)))


class Events(FromSources):
    """``/api/run/<id>/events``."""

    async def get(self, run_id: str) -> None:
        await self.reply(lambda: self.sources.events(run_id))


class Steps(FromSources):
    """``/api/run/<id>/steps?last=30&until=<step>``."""

    async def get(self, run_id: str) -> None:
        last = self.number("last", LAST_STEPS)
        until = self.number("until", 0) if self.get_query_argument("until", "") else None
        await self.reply(lambda: self.sources.steps(run_id, last, until))


class Configs(FromSources):
    """``/api/config?run=a&run=b``."""

    async def get(self) -> None:
        runs = self.get_query_arguments("run", strip=False)
        await self.reply(lambda: self.sources.config(runs))


ROUTES = [
    ("/api/runs", RunList),
    ("/api/run/([^/]+)/metrics", Metrics),
    ("/api/run/([^/]+)/events", Events),
    ("/api/run/([^/]+)/steps", Steps),
    ("/api/config", Configs),
]
