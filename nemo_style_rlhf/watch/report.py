"""One HTML file that shows runs without a server: the page itself, with the answers of its server written into it.

The page's modules become ``data:`` addresses of an import map, since a file cannot import its neighbors. Answers come from the
real server on loopback, so a report shows what the page shows. Its policy lets the file load and send nothing.
"""

import asyncio
import base64
import hashlib
import json
import re
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlencode

from tornado.httpclient import AsyncHTTPClient
from tornado.web import Application

from nemo_style_rlhf.checkpoint.files import storage_errors, write_atomically
from nemo_style_rlhf.watch.door import Door
from nemo_style_rlhf.watch.handlers import PAGE, to_json
from nemo_style_rlhf.wire.entrance import Entrance

POINTS = 600
"""Points of a metric in a report."""
DIGITS = 6
"""Significant digits of a number in a report."""
TIMEOUT_S = 3600.0
TABLE_ROWS = 50
ROWS_AT_ONCE = 100
"""Maximum number of prompts in an answer about a comparison."""
DETAILED_ROWS = 10
"""Samples of each table that a report holds with their tokens."""
SAMPLE_BYTES = 8 * 2**20
"""Maximum bytes of all samples with tokens in a report."""
TABLES: list[dict[str, str]] = [
    {},
    {"sort": "reward"},
    {"sort": "reward", "desc": "0"},
    {"sort": "kl_max"},
    {"filter": "failed:eq:true"},
    {"filter": "finish_reason:eq:length"},
]
"""Queries of the buttons of the rollouts' view: newest, best, worst, largest KL, failed, truncated samples."""
UNQUOTED = "!'()*"
"""Characters that JavaScript's encodeURIComponent leaves as they are, in addition to those of ``quote``."""
MOST_PAIRED = 12
"""Runs up to which every pair has its comparison of configurations in a report."""
STYLESHEET = re.compile('<link rel="stylesheet" href="([^"]+)">')
IMPORT = re.compile(r'(\bfrom |\bimport\(|\bimport )"(\.{1,2}/[^"]+)"')


def loopback_door() -> Door:
    """A door for this process only."""
    return Door(socket.create_server(("127.0.0.1", 0)), secrets.token_hex(16), True, frozenset({"localhost"}), None)


def export(application: Application, door: Door, target: Path) -> int:
    """Write the report to ``target``.

    Returns:
        Its size in bytes.

    Raises:
        StorageError: the disk refused.
    """
    answers = asyncio.run(_collect(application, door))
    content = page_of(answers).encode()
    with storage_errors(target, "make room, or give another --export"):
        write_atomically(target, content)
    return len(content)


async def _collect(application: Application, door: Door) -> dict[str, Any]:
    stop_accepting = Entrance(application, largest_body=0).open(door.listener)
    client = _Client(AsyncHTTPClient(max_body_size=2**31), door)
    answers = {key: answer async for key, answer in _answers(client)}
    stop_accepting()
    door.listener.close()
    answers["exported"] = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return answers


@dataclass
class _Client:
    http: AsyncHTTPClient
    door: Door

    async def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """The answer; None if the page has no such address, or cannot answer it."""
        address = f"{self.door.url.rstrip('/')}{path}?{urlencode(query or {}, doseq=True)}"
        headers = {"Authorization": f"Bearer {self.door.token}"}
        response = await self.http.fetch(address, headers=headers, raise_error=False, request_timeout=TIMEOUT_S)
        return _rounded(json.loads(response.body)) if response.code == 200 else None


def key_of(path: str, query: Mapping[str, Any]) -> str:
    """The key by which api.js looks an answer up: the path, and the parameters sorted by name, as they are."""
    pairs = [
        (name, value) for name, values in query.items() for value in (values if isinstance(values, list) else [values])
    ]
    words = [f"{name}={value}" for name, value in sorted(pairs, key=lambda pair: pair[0])]
    return f"{path}?{'&'.join(words)}" if words else path


async def _answers(client: _Client) -> AsyncIterator[tuple[str, Any]]:
    listed = await client.get("/api/runs")
    yield "/api/runs", listed
    ids = [run["id"] for run in listed["runs"]]
    for run in ids:
        path = f"/api/run/{quote(run, safe=UNQUOTED)}"
        yield f"{path}/metrics", await client.get(f"{path}/metrics", {"most": POINTS})
        yield f"{path}/events", await client.get(f"{path}/events")
        yield f"{path}/steps", await client.get(f"{path}/steps")
    for chosen in _choices(ids):
        yield key_of("/api/config", {"run": chosen}), await client.get("/api/config", {"run": chosen})
    recorded = await client.get("/api/recorded")
    if recorded is not None:
        yield "/api/recorded", recorded
        async for key, answer in _of_rollouts(client, recorded["rollouts"]):
            yield key, answer
        for run in recorded["evaluations"]:
            yield key_of("/api/compare", {"run": run}), await _comparison(client, run)


def _choices(ids: list[str]) -> Iterator[list[str]]:
    """Runs whose configurations a reader may want side by side."""
    yield from ([run] for run in ids)
    if len(ids) <= MOST_PAIRED:
        yield from ([one, other] for one in ids for other in ids if one != other)


async def _of_rollouts(client: _Client, runs: list[str]) -> AsyncIterator[tuple[str, Any]]:
    left = SAMPLE_BYTES
    for run in runs:
        wanted: dict[tuple[int, int], dict[str, Any]] = {}
        for table in TABLES:
            query = {"run": run, "by": "sample", "sort": "step", "offset": 0, "limit": TABLE_ROWS, **table}
            answer = await client.get("/api/rollouts", query)
            if answer is not None:
                yield key_of("/api/rollouts", query), answer
                wanted |= {(row["step"], row["row"]): row for row in answer["rows"][:DETAILED_ROWS]}
        for (step, place), row in wanted.items():
            sample = {"run": run, "step": step, "row": place, "first": 0, "count": 4000}
            group = {"run": run, "step": step, "prompt_id": row["prompt_id"]}
            for path, query in (("/api/sample", sample), ("/api/group", group)):
                answer = await client.get(path, query)
                if answer is not None and (size := len(to_json(answer))) <= left:
                    left -= size
                    yield key_of(path, query), answer


async def _comparison(client: _Client, run: str) -> dict[str, Any] | None:
    """An evaluation with all its rows: the report's own script searches and sorts them."""
    whole: dict[str, Any] | None = await client.get("/api/compare", {"run": run, "limit": ROWS_AT_ONCE})
    while whole is not None and len(whole["rows"]) < whole["total"]:
        query = {"run": run, "limit": ROWS_AT_ONCE, "offset": len(whole["rows"])}
        part = await client.get("/api/compare", query)
        if part is None:  # it changes at this moment
            return None
        whole["rows"] += part["rows"]
    return whole


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: each if key.startswith("clock/") else _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and abs(value) < 1e9 else value


def page_of(answers: Mapping[str, Any]) -> str:
    """The page with all its files and ``answers`` in it."""
    page = (PAGE / "index.html").read_text()
    style = "\n".join((PAGE / name).read_text() for name in STYLESHEET.findall(page))
    imports = json.dumps({"imports": dict(_modules())})
    start = 'import "page/app.js";'
    recorded = to_json(answers).replace("<", "\\u003c")
    hashes = " ".join(map(_source, (imports, start)))
    policy = (
        f"default-src 'none'; script-src {hashes} data:; style-src {_source(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="application/json" id="recorded">{recorded}</script>\n'
        f'<script type="importmap">{imports}</script>\n<script type="module">{start}</script>\n'
    )
    kept = "".join(line for line in page.splitlines(keepends=True) if "stylesheet" not in line and "app.js" not in line)
    return kept.replace("<title>", head + "<title>", 1)


def _modules() -> Iterator[tuple[str, str]]:
    """Name and ``data:`` address of each module, its imports by name."""
    for path in sorted(PAGE.rglob("*.js")):
        name = PurePosixPath(path.relative_to(PAGE).as_posix())

        def named(found: re.Match[str], folder: PurePosixPath = name.parent) -> str:
            return f'{found[1]}"page/{_joined(folder, found[2])}"'

        code = IMPORT.sub(named, path.read_text()).encode()
        yield f"page/{name}", f"data:text/javascript;base64,{base64.b64encode(code).decode()}"


def _joined(folder: PurePosixPath, relative: str) -> str:
    parts = list(folder.parts)
    for part in relative.split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _source(text: str) -> str:
    """The name of an inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
