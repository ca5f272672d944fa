"""The starts of a run: records each start's changes to the configuration, and refuses changes that no start may make.

``config.yaml`` holds the configuration of the newest start, ``configs/002_step_000040.yaml`` the second start's, if that resumed
from the checkpoint of step 40. A start with the configuration of the one before adds no file.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from nemo_style_rlhf.checkpoint.files import (
    damaged_files,
    file_digests,
    sampled_sha256,
    storage_errors,
    write_atomically,
)
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.errors import UserError

NEWEST = "config.yaml"
ALL = "configs"
DAY = ".first_day"
"""File by which the ranks of a new run, and all starts of an evaluation, agree on ``data.today``."""
DONE = "done.json"
"""File that lists the exported files with sampled digests. It exists only between the end of a run and its next start."""
PLACES = ("host", "port", "ready_file", "replicas", "resume", "dry_run", "takeover_s")
"""Last parts of keys that say where or how a process starts. They may change with every job, so they are not compared."""
PROGRAMS = {"server": "a server", "algorithm": "a PPO trainer", "trainer": "a supervised stage"}
"""The program that a configuration belongs to, by a section that other programs' configurations lack."""
LONGEST_VALUE = 80
log = logging.getLogger(__name__)


def settle_today(config: Any, *, recorded: bool = True) -> None:
    """Set ``data.today``, if it is null, to the date of the first start in ``run.output_dir``: a template that writes the date
    then makes the same tokens on every day. Ranks that start around midnight agree, by a file that the first of them makes.

    Args:
        config: a checked dataclass with ``run`` and ``data``.
        recorded: True if :func:`record_start` saves the configuration and the date in it; else that file saves the date.
    """
    if config.data.today is not None:
        return
    output_dir = Path(config.run.output_dir)
    with suppress(OSError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        config.data.today = yaml.safe_load((output_dir / NEWEST).read_text())["data"].get("today")
    if config.data.today is None:
        config.data.today = date.today().isoformat()
        if not config.run.dry_run and (not recorded or os.environ.get("WORLD_SIZE", "1") != "1"):
            config.data.today = _agreed(output_dir / DAY, config.data.today)


def _agreed(path: Path, own: str) -> str:
    """The content of ``path``: the value ``own`` of the first process that called this."""
    beside = path.with_name(f"{path.name}.{os.environ.get('RANK')}.tmp")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(own)
        with suppress(FileExistsError):
            os.link(beside, path)
        beside.unlink()
        return path.read_text()


def differences(output_dir: Path, config: Any) -> list[str] | None:
    """``key: old -> new`` for each key whose value differs from the last start in ``output_dir``; None before the first start.

    Args:
        config: a checked dataclass.

    Raises:
        UserError: another program's run is in ``output_dir``: its configuration would be lost.
    """
    newest = output_dir / NEWEST
    if not newest.is_file():
        return None
    try:
        recorded = yaml.safe_load(newest.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        log.warning("%s is damaged: what this start changes about the last one is not known", newest)
        return None
    given = yaml.safe_load(_text(config))
    theirs, ours = ([name for section, name in PROGRAMS.items() if section in (of or ())] for of in (recorded, given))
    if theirs and ours and theirs != ours:
        raise UserError(
            f"run.output_dir={output_dir} holds the run of {theirs[0]}, this is {ours[0]}: choose another "
            "run.output_dir, each program needs its own"
        )
    before, now = dict(leaves(recorded)), dict(leaves(given))
    keys = [key for key in {**now, **before} if key.rpartition(".")[2] not in PLACES]
    values = [(key, _shown(before, key), _shown(now, key)) for key in keys]
    return [f"{key}: {old} -> {new}" for key, old, new in values if old != new]


def log_differences(output_dir: Path, config: Any) -> None:
    """Log a line for each key whose value differs from the last start in ``output_dir``."""
    if changed := differences(output_dir, config):
        log.warning("the last start in %s had another configuration; from here on:", output_dir)
        for line in changed:
            log.warning("  %s", line)


def record_start(output_dir: Path, config: Any, *, after: str) -> None:
    """Record ``config`` as the configuration of the run in ``output_dir`` from now on.

    Args:
        after: name of the checkpoint that it resumes from, ``step_000000`` at the beginning.

    Raises:
        StorageError: the disk refused.
    """
    require_owned()
    changed = differences(output_dir, config)
    (output_dir / DONE).unlink(missing_ok=True)
    if changed == []:
        return
    newest, kept = output_dir / NEWEST, output_dir / ALL
    with storage_errors(newest):
        text = _text(config).encode()
        write_atomically(kept / f"{len(list(kept.glob('*.yaml'))) + 1:03d}_{after}.yaml", text)
        write_atomically(newest, text)


def require_same(saved: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Refuse to resume from a checkpoint if a setting that gives the checkpoint its meaning has changed.

    Args:
        saved: settings in the checkpoint; those that it lacks are not compared.
        where: name of the checkpoint, for the error.

    Raises:
        UserError: a setting differs.
    """
    for name, value in given.items():
        if name in saved and saved[name] != value:
            raise UserError(
                f"{where} is of a run with {name} {saved[name]}, this one has {value}: resume it as it was, or choose another "
                "run.output_dir"
            )


def require_reachable(step: int, total_steps: int, key: str, where: str) -> None:
    """Check that a checkpoint's ``step`` is not beyond ``total_steps``, the run's last.

    Args:
        key: configuration key that makes the run longer.
        where: name of the checkpoint, for the error.

    Raises:
        UserError: it is beyond: its weights would be exported as the result of a shorter run.
    """
    if step > total_steps:
        raise UserError(
            f"{where} stands at step {step} but the run now ends after {total_steps}: raise {key}, or choose another "
            "run.output_dir"
        )


def require_work(step: int, total_steps: int, config: Any, longer: str) -> None:
    """Refuse to start an ended run with another configuration that leaves no step to train.

    Args:
        step: step of the checkpoint that the run resumes from.
        config: a checked dataclass with ``run``, a :class:`TrainerRunConfig`.
        longer: configuration key that makes the run longer.

    Raises:
        UserError: the run has ended, and this start would only export again.
    """
    output_dir = Path(config.run.output_dir)
    if step == total_steps and not config.run.dry_run and (ended := _recorded_end(output_dir)):
        changed = "; ".join(differences(output_dir, config) or ["nothing"])
        raise UserError(
            f"the run in {output_dir} has ended after step {step} and exported {', '.join(map(str, ended[0]))}; this start "
            f"changes {changed}, but leaves no step to train: raise {longer}, or choose another run.output_dir"
        )


def record_end(output_dir: Path, exports: Iterable[Path], *, why: str | None = None) -> None:
    """Record that the run has ended, its exported folders, and with ``why`` the reason if it ended before its last step."""
    files = {str(folder.resolve()): file_digests(folder, sampled_sha256) for folder in exports}
    content = {"exports": files, **({"why": why} if why else {})}
    with storage_errors(output_dir / DONE):
        write_atomically(output_dir / DONE, json.dumps(content, indent=1).encode())


def is_done(config: Any, *, longer: str) -> bool:
    """Print and return True if the run of exactly this configuration has ended and its exports are complete and undamaged.

    Every rank calls this, before ranks can communicate, and reads a quarter of a mebibyte of each exported file.

    Args:
        config: a checked dataclass with ``run``, a :class:`TrainerRunConfig`.
        longer: configuration key that makes the run longer.
    """
    output_dir = Path(config.run.output_dir)
    if config.run.resume == "never" or differences(output_dir, config) != []:
        return False
    if (ended := _recorded_end(output_dir)) is None:
        return False
    exports, why = ended
    if _is_first_rank():
        names = ", ".join(map(str, exports))
        print(
            f"done: this run has ended{why and f' ({why})'} and exported {names}; to train on raise {longer}, to start anew "
            "choose another run.output_dir"
        )
    return True


def _recorded_end(output_dir: Path) -> tuple[list[Path], str] | None:
    """The exported folders of an ended run, and the reason if it ended early; None if it has not ended or a folder is damaged."""
    done = output_dir / DONE
    if not done.is_file():
        return None
    try:
        content = json.loads(done.read_bytes())
        exports = {Path(folder): dict(digests) for folder, digests in content["exports"].items()}
        why = str(content.get("why", ""))
    except (ValueError, AttributeError, KeyError, TypeError):
        if _is_first_rank():
            log.warning("%s is damaged: the run goes on from its last checkpoint and exports anew", done)
        return None
    if any(damaged_files(folder, digests, sampled_sha256) for folder, digests in exports.items()):
        return None
    return list(exports), why


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _text(config: Any) -> str:
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def leaves(node: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """Every value of a configuration, with its key: ``algorithm.kl_in``."""
    if isinstance(node, dict) and (node or not key):
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not there"
    value = values[key]
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= LONGEST_VALUE:
        return text
    whole = value if isinstance(value, str) else text  # the digest that sha256sum gives for a template's file
    return f"{text[:LONGEST_VALUE]}... (sha256 {hashlib.sha256(whole.encode()).hexdigest()[:12]})"
