"""Answers of the page about rollouts, a function each, for the server and for reports."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.watch import comparison, sample_queries
from nemo_style_rlhf.watch.rollout_files import list_files
from nemo_style_rlhf.watch.rollout_index import RolloutIndex
from nemo_style_rlhf.watch.runs import Runs
from nemo_style_rlhf.watch.sample_tokens import MOST_TOKENS, sample_json
from nemo_style_rlhf.watch.tokens import load_tokenizer

INDEXES = 4
"""Runs whose samples stay in memory."""
PAGES = 32
FOLDER = "rollouts"
MOST_ROWS = 100


class RolloutSources:
    """Finds runs by id; every method raises UnknownRun if there is none."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._indexes: OrderedDict[Path, RolloutIndex] = OrderedDict()
        self._pages: OrderedDict[tuple[Path, int, sample_queries.Query, bool], dict[str, Any]] = OrderedDict()
        self._lock = Lock()

    def folder(self, run: str) -> Path:
        """The folder of the run's rollouts; need not exist."""
        return self._runs.get(run).folder / FOLDER

    def index(self, run: str) -> RolloutIndex:
        """The index of the run. The least recently used one is dropped."""
        folder = self.folder(run)
        with self._lock:
            index = self._indexes.pop(folder, None) or RolloutIndex(folder)
            self._indexes[folder] = index
            while len(self._indexes) > INDEXES:
                self._indexes.popitem(last=False)
            return index

    def recorded(self) -> dict[str, list[str]]:
        """The runs that have rollouts, and the evaluations."""
        runs = self._runs.all()
        return {
            "rollouts": [run.id for run in runs if list_files(run.folder / FOLDER)],
            "evaluations": [run.id for run in runs if (run.folder / comparison.RESULTS).exists()],
        }

    def page(self, run: str, query: sample_queries.Query, *, texts: bool = True) -> dict[str, Any]:
        """A page of samples. The last pages are cached until samples change: an open view of a running run asks repeatedly."""
        index = self.index(run)
        index.refresh(sample_queries.PATIENCE_S)
        key = (index.folder, index.changes, query, texts)
        with self._lock:
            known = self._pages.get(key)
        if known is not None:
            return known
        answer = sample_queries.page(index, query, texts=texts)
        if key[1] == index.changes and answer["files_read"] == answer["files"]:
            with self._lock:
                self._pages[key] = answer
                while len(self._pages) > PAGES:
                    self._pages.popitem(last=False)
        return answer

    def group(self, run: str, step: int, prompt_id: int) -> dict[str, Any]:
        return {"samples": sample_queries.group(self.index(run), step, prompt_id)}

    def prompt(self, run: str, prompt_id: int, offset: int, limit: int) -> dict[str, Any]:
        return sample_queries.history(self.index(run), prompt_id, offset, limit)

    def sample(self, run: str, step: int, row: int, first: int = 0, count: int = MOST_TOKENS) -> dict[str, Any]:
        index = self.index(run)
        return sample_json(sample_queries.sample(index, step, row), load_tokenizer(index.folder), first, count)

    def compare(
        self, runs: Sequence[str], steps: Sequence[int], order: str, text: str, offset: int, limit: int
    ) -> dict[str, Any]:
        """Compare the answers of several checkpoints to the same prompts.

        Args:
            runs: evaluations, or runs with rollouts.
            steps: of each run with rollouts; without, the newest that all of them have.

        Raises:
            UserError: there is nothing to compare, or no such order.
        """
        sides, told = self._sides(runs, steps)
        rows, sides, elsewhere = comparison.rows_of(sides, same_prompts=len(set(runs)) == 1 and bool(told))
        shown, matches = comparison.found(comparison.ordered(rows, order), text)
        page = shown[max(offset, 0) :][: min(max(limit, 1), MOST_ROWS)]
        return {
            "sides": comparison.summaries(sides) if rows else [],
            "facts": told,
            "total": len(rows),
            "elsewhere": elsewhere,
            "found": len(shown),
            "matches": matches,
            "range": comparison.score_range(rows),
            "rows": [comparison.row_json(row, sides) for row in page],
        }

    def _sides(self, runs: Sequence[str], steps: Sequence[int]) -> tuple[list[comparison.Side], dict[str, Any]]:
        """The sides, and the summary of an evaluation among them."""
        if not runs:
            raise UserError("there is nothing to compare: choose an evaluation, or two runs or steps with rollouts")
        folders = {run: self._runs.get(run).folder for run in runs}
        indexes = {run: self.index(run) for run in runs if not (folders[run] / comparison.RESULTS).exists()}
        missing = sum(run in indexes for run in runs) - len(steps)
        newest = [comparison.newest_common_step(list(indexes.values()))] * missing if missing > 0 else []
        left = iter([*steps, *newest])
        sides, told = list[comparison.Side](), dict[str, Any]()
        for run in runs:
            if run in indexes:
                sides.append(comparison.rollout_side(indexes[run], run, next(left)))
            else:
                sides += comparison.evaluation_sides(folders[run])
                told = told or comparison.facts(folders[run])
        return sides, told
