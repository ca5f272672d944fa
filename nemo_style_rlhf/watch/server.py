"""The page's web server: its addresses and their handlers."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tornado.web import Application

from nemo_style_rlhf.watch import report, rollout_routes, run_routes
from nemo_style_rlhf.watch.door import Door, take_door
from nemo_style_rlhf.watch.handlers import PAGE, Login, Page, Style
from nemo_style_rlhf.watch.rollout_sources import RolloutSources
from nemo_style_rlhf.watch.runs import Runs
from nemo_style_rlhf.wire.entrance import Entrance
from nemo_style_rlhf.wire.limits import JSON_BODY_BYTES
from nemo_style_rlhf.wire.listening import BACKLOG

ROUTES = [*run_routes.ROUTES, *rollout_routes.ROUTES]
"""Every ``(pattern, handler)`` below /api/; handlers are subclasses of :class:`handlers.Api`."""


def application(runs: Runs, door: Door) -> Application:
    page = {"path": str(PAGE), "default_filename": "index.html"}
    files: list[Any] = [
        ("/token", Login),
        ("/(style.css)", Style, page),
        ("/(.*)", Page, page),
    ]
    settings: dict[str, Any] = {"sources": run_routes.Sources(runs), "rollouts": RolloutSources(runs)}
    return Application([*ROUTES, *files], door=door, compress_response=True, **settings)


async def serve(runs: Runs, door: Door) -> None:
    """Serve until the process ends."""
    door.listener.listen(BACKLOG)
    Entrance(application(runs, door), largest_body=JSON_BODY_BYTES, tls=door.tls).open(door.listener)
    print(f"open {door.link}  (Ctrl-C ends it)", flush=True)
    await asyncio.Event().wait()


def watch(
    folders: Sequence[Path],
    *,
    host: str,
    port: int,
    token_file: str | None,
    certificate: str | None,
    key: str | None,
    export: Path | None,
) -> None:
    """Serve the page of the runs below ``folders``, until Ctrl-C; or write it to the file ``export``.

    Raises:
        UserError: a folder does not exist, the address is not available, or the disk refused the file.
    """
    runs = Runs(folders)
    logging.getLogger("tornado").setLevel(logging.ERROR)
    if export is not None:
        door = report.loopback_door()
        size = report.export(application(runs, door), door, export)
        print(f"wrote {export} ({size / 2**20:.1f} MiB): open it in a browser, or send it to somebody")
        return
    door = take_door(host, port, token_file, certificate, key)
    asyncio.run(serve(runs, door))
