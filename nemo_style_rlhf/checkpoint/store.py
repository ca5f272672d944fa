"""Checkpoints of a run: folders that count only once a manifest, written last, names every file of actor and critic.

The folders in a checkpoint's folder are its named parts. The manifest covers them all, so a new part needs no change here.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_style_rlhf.checkpoint.files import (
    STORAGE_ERRORS,
    Space,
    deviations,
    file_digests,
    fsync,
    fsync_tree,
    storage_failure,
    write_atomically,
)
from nemo_style_rlhf.checkpoint.names import is_run_id
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.errors import StorageError, UserError

FORMAT = 1
MANIFEST = "manifest.json"
ACTOR = "actor"
AHEAD = "ahead"
"""Part with the samples prefetched for later steps; absent if there are none."""
HF = "hf"
"""Part with the policy as a Hugging Face directory, with checkpoint.save_hf; its adapter lies next to it."""
FOR_OTHERS = (HF, f"{HF}_adapter")
"""Parts for other programs. They are written and deleted with their checkpoint, but a run does not resume from them."""
log = logging.getLogger(__name__)


@dataclass
class Manifest:
    """Content of ``step_XXXXXX/manifest.json``."""

    format: int
    step: int
    """Number of finished PPO steps."""
    run_id: str
    files: dict[str, str]
    """SHA-256 of the files that a resume reads, by path below the checkpoint's folder."""
    critic: dict[str, Any]
    """The critic checkpoint as the server described it: its step, files and their digests."""
    state: dict[str, Any]
    """Counters of the training loop: data position, critic step, KL coefficient, ..."""
    versions: dict[str, str]
    """Versions of packages on which results may depend."""
    digest: str = ""
    """SHA-256 of all fields above."""


class CheckpointStore:
    """The actor's folder of checkpoints, ``<output_dir>/checkpoints``."""

    def __init__(self, root: Path, keep_last: int) -> None:
        self._root = root.resolve()
        self._keep_last = keep_last
        self._left_behind: list[int] = []

    def begin(self, step: int) -> Path:
        """Make an empty folder for the part ``actor`` of a checkpoint. The checkpoint counts once it is committed."""
        require_owned(self._root)
        shutil.rmtree(self._folder(step), ignore_errors=True)  # left by an attempt that ended early, or damaged
        folder = self.part(step, ACTOR)
        folder.mkdir(parents=True)
        return folder

    def commit(
        self, step: int, run_id: str, *, critic: dict[str, Any], state: dict[str, Any], versions: dict[str, str]
    ) -> None:
        """Turn the files of all parts and the description ``critic`` into a checkpoint: the manifest naming them appears last, by
        rename."""
        folder = self._folder(step)
        fsync_tree(folder)
        require_owned(self._root)
        files = file_digests(folder, besides=FOR_OTHERS)
        manifest = Manifest(FORMAT, step, run_id, files, critic, state, versions)
        content = asdict(manifest)
        content["digest"] = _digest(content)
        write_atomically(folder / MANIFEST, json.dumps(content, indent=1).encode())
        for folder in (self._root, self._root.parent):  # before an older one is deleted
            fsync(folder)

    @contextmanager
    def whole_or_absent(self, step: int, *, needed: int = 0) -> Iterator[None]:
        """Context for everything that writes a checkpoint. If the disk refuses, the incomplete checkpoint is removed.

        Args:
            needed: bytes that will be written, as far as they are known.

        Raises:
            StorageError: the disk refused; earlier committed checkpoints are whole.
        """
        space = Space.of(self._root, needed)
        try:
            yield
        except STORAGE_ERRORS as error:
            if (reason := storage_failure(error, space)) is None:
                raise
            require_owned(self._root)
            shutil.rmtree(self._folder(step), ignore_errors=True)
            committed = self.committed_steps()
            resume = (
                f"started again, the run resumes from step {committed[-1]}" if committed else "there is no earlier one"
            )
            raise StorageError(
                f"the checkpoint of step {step} could not be saved in {self._root} ({reason}): make room; {resume}"
            ) from error

    def resume_from(self, step: int) -> None:
        """Mark all later checkpoints as useless, since they could not be restored. Each is deleted once the run has passed it."""
        self._left_behind = [later for later in self.committed_steps() if later > step]

    def prune(self, newest: int) -> None:
        """Delete all checkpoints older than the last ``keep_last`` committed ones up to step ``newest``."""
        require_owned(self._root)
        for step in self._left_behind:
            if step < newest:
                self._delete(step)
        self._left_behind = [step for step in self._left_behind if step > newest]
        committed = [step for step in self.committed_steps() if step <= newest]
        if len(committed) > self._keep_last:
            for step in self._steps():
                if step < committed[-self._keep_last]:
                    self._delete(step)

    def _delete(self, step: int) -> None:
        folder = self._folder(step)
        try:
            (folder / MANIFEST).unlink(missing_ok=True)  # first, so that a partly deleted folder is not a checkpoint
            shutil.rmtree(folder)
        except OSError as error:  # another process may be reading it; the next commit tries again
            log.warning("the old checkpoint %s cannot be deleted now: %s", folder, error)

    def latest(self) -> Manifest | None:
        """The newest undamaged checkpoint; None if none was ever committed.

        Raises:
            UserError: every checkpoint is damaged. Starting over in this folder would replace them.
        """
        newest = next(self.undamaged(), None)
        if newest is None and (steps := self.committed_steps()):
            raise UserError(
                f"every checkpoint in {self._root} is damaged (steps {', '.join(map(str, steps))}): bring one back from a copy, "
                "or give another run.output_dir to start over"
            )
        return newest

    def undamaged(self) -> Iterator[Manifest]:
        """The committed checkpoints whose files are exactly those written, complete and unchanged; newest first."""
        for step in reversed(self.committed_steps()):
            manifest, damaged = self.examined(step)
            if manifest is None:
                log.warning("checkpoint step_%06d is damaged (%s): falling back to the one before it", step, damaged)
            else:
                yield manifest

    def examined(self, step: int) -> tuple[Manifest | None, str]:
        """The manifest of a committed checkpoint, or None and the name of a file that is damaged, missing or too many."""
        manifest, folder = self._read(step), self._folder(step)
        if manifest is None:
            return None, MANIFEST
        others = [path for name in FOR_OTHERS for path in (folder / name).rglob("*")]
        besides = [MANIFEST, *(path.relative_to(folder).as_posix() for path in others)]
        damaged = deviations(folder, manifest.files, besides=besides)
        return (None, damaged[0]) if damaged else (manifest, "")

    def _read(self, step: int) -> Manifest | None:
        """The manifest of ``step``; None if it cannot be read.

        Raises:
            UserError: the manifest has another format.
        """
        path = self._folder(step) / MANIFEST
        if path.is_symlink():
            return None
        try:
            content = json.loads(path.read_bytes())
            found = content["format"]
            if found != FORMAT and content.get("digest") != _digest({**content, "format": FORMAT}):
                raise UserError(
                    f"{path} has format {found}, this version reads {FORMAT}: resume with the version that wrote it"
                )
            manifest = Manifest(**content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if not (is_run_id(manifest.run_id) and manifest.step == step and isinstance(manifest.files, dict)):
            return None
        return manifest if manifest.digest == _digest(content) else None

    def part(self, step: int, name: str) -> Path:
        """The folder of a named part."""
        return self._folder(step) / name

    def committed_steps(self) -> list[int]:
        return [step for step in self._steps() if (self._folder(step) / MANIFEST).is_file()]

    def _steps(self) -> list[int]:
        if not self._root.is_dir():
            return []
        matches = (re.fullmatch(r"step_(\d{6,})", path.name) for path in self._root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def _folder(self, step: int) -> Path:
        return self._root / f"step_{step:06d}"


def _digest(content: dict[str, Any]) -> str:
    """Digest of a manifest without its field ``digest``."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
