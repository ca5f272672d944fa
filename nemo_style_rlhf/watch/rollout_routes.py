"""Answers about rollouts: pages of samples, one sample, a search, and responses side by side."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tornado.iostream import StreamClosedError
from tornado.web import HTTPError

from nemo_style_rlhf.watch.handlers import Api, to_json
from nemo_style_rlhf.watch.rollout_sources import RolloutSources
from nemo_style_rlhf.watch.runs import UnknownRun
from nemo_style_rlhf.watch.sample_queries import Filter, Query
from nemo_style_rlhf.watch.sample_tokens import MOST_TOKENS
from nemo_style_rlhf.watch.search import Search

SEARCHES = ThreadPoolExecutor(2, thread_name_prefix="search")
"""Own threads, so that searches do not block views."""


class RolloutApi(Api):
    @property
    def rollouts(self) -> RolloutSources:
        sources: RolloutSources = self.settings["rollouts"]
        return sources

    @property
    def run(self) -> str:
        return self.get_query_argument("run", "")


class Recorded(RolloutApi):
    """``/api/recorded``."""

    async def get(self) -> None:
        await self.reply(self.rollouts.recorded)


class Rollouts(RolloutApi):
    """``/api/rollouts?run=&by=&sort=&desc=&filter=&offset=&limit=``."""

    async def get(self) -> None:
        run, offset, limit = self.run, self.number("offset", 0), self.number("limit", 50)
        by, sort = self.get_query_argument("by", "sample"), self.get_query_argument("sort", "")
        descending, texts = self.number("desc", 1) == 1, self.number("texts", 1) == 1
        filters = self.get_query_arguments("filter")

        def work() -> dict[str, Any]:
            query = Query(tuple(Filter.parse(each) for each in filters), sort, descending, by, offset, limit)
            return self.rollouts.page(run, query, texts=texts)

        await self.reply(work)


class GroupHandler(RolloutApi):
    """``/api/group?run=&step=&prompt_id=``: the samples of a prompt in a step."""

    async def get(self) -> None:
        run, step, prompt_id = self.run, self.number("step", 0), self.number("prompt_id", 0)
        await self.reply(lambda: self.rollouts.group(run, step, prompt_id))


class PromptHistory(RolloutApi):
    """``/api/prompt?run=&prompt_id=&offset=&limit=``: a prompt's answers, newest step first."""

    async def get(self) -> None:
        run, prompt_id = self.run, self.number("prompt_id", 0)
        offset, limit = self.number("offset", 0), self.number("limit", 10)
        await self.reply(lambda: self.rollouts.prompt(run, prompt_id, offset, limit))


class SampleHandler(RolloutApi):
    """``/api/sample?run=&step=&row=&first=&count=``: one sample, and ``count`` of its tokens from ``first`` on."""

    async def get(self) -> None:
        run, step, row = self.run, self.number("step", 0), self.number("row", 0)
        first, count = self.number("first", 0), self.number("count", MOST_TOKENS)
        await self.reply(lambda: self.rollouts.sample(run, step, row, first, count))


class SearchTexts(RolloutApi):
    """``/api/search?run=&q=``: hits as lines of JSON while they are found, until the client hangs up."""

    _search: Search | None = None

    async def get(self) -> None:
        run, text = self.run, self.get_query_argument("q", "", strip=False)
        loop = asyncio.get_running_loop()
        try:
            folder = await loop.run_in_executor(None, self.rollouts.folder, run)
        except UnknownRun as error:
            raise HTTPError(404, str(error).replace("%", "%%")) from error
        self._search = Search(folder, text)
        messages = self._search.messages()
        self.set_header("Content-Type", "application/x-ndjson")
        try:
            while lines := await loop.run_in_executor(SEARCHES, _until_progress, messages):
                self.write("".join(to_json(line) + "\n" for line in lines))
                await self.flush()
        except StreamClosedError:
            pass
        finally:
            self._search.stop()
            await loop.run_in_executor(SEARCHES, messages.close)

    def on_connection_close(self) -> None:
        if self._search is not None:
            self._search.stop()


def _until_progress(messages: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages up to the next one about the search's progress; empty at the end."""
    lines = []
    for message in messages:
        lines.append(message)
        if "of" in message:
            break
    return lines


class Compare(RolloutApi):
    """``/api/compare?run=&run=&step=&step=&order=&q=&offset=&limit=``: the same prompts, answered by several."""

    async def get(self) -> None:
        runs = self.get_query_arguments("run")
        given = self.get_query_arguments("step")
        if not all(step.isdecimal() for step in given):
            raise HTTPError(400, "step is no whole number")
        steps = [int(step) for step in given]
        order, text = self.get_query_argument("order", "file"), self.get_query_argument("q", "")
        offset, limit = self.number("offset", 0), self.number("limit", 20)
        await self.reply(lambda: self.rollouts.compare(runs, steps, order, text, offset, limit))


ROUTES = [
    ("/api/recorded", Recorded),
    ("/api/rollouts", Rollouts),
    ("/api/group", GroupHandler),
    ("/api/prompt", PromptHistory),
    ("/api/sample", SampleHandler),
    ("/api/search", SearchTexts),
    ("/api/compare", Compare),
]
