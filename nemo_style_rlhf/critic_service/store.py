"""Critic checkpoints on disk: written to a temporary folder and renamed, digested, committed, pruned.

``<output_dir>/checkpoints/<checkpoint_id>/critic/`` holds a critic checkpoint, with its step and digests in ``critic.json``;
``<output_dir>/checkpoints/critic_committed.json`` lists the committed ids, oldest first. The actor may keep its checkpoint in
the same ``<checkpoint_id>`` folder: the server touches only ``critic``.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_style_rlhf.checkpoint.files import (
    STORAGE_ERRORS,
    Space,
    deviations,
    file_digests,
    finish_publishing,
    fsync,
    published,
    storage_failure,
    write_atomically,
)
from nemo_style_rlhf.checkpoint.names import is_checkpoint_id, run_of
from nemo_style_rlhf.checkpoint.owner import require_owned
from nemo_style_rlhf.errors import UserError
from nemo_style_rlhf.wire.messages import Code, ProtocolError

RECORD = "critic.json"
REWARD_MODEL = "reward model"
"""Name, in a record, of the digest of the reward model; a server may have none."""
START_WEIGHTS = "the weights at the start (value_model.path, run.seed)"
"""Name, in a record, of the digest of the weights from which the critic started."""
log = logging.getLogger(__name__)


@dataclass
class CheckpointRecord:
    """Content of ``critic.json``, the description of a critic checkpoint."""

    critic_step: int
    digests: dict[str, str]
    """SHA-256 of every other file, by path relative to the checkpoint's folder."""
    critic: dict[str, Any] = field(default_factory=dict)
    """Properties of the critic that a server must share to restore the checkpoint."""


class CriticCheckpointStore:
    """All critic checkpoints below one output directory."""

    def __init__(self, output_dir: Path, critic: dict[str, Any] | None = None) -> None:
        """``critic`` describes the server's critic; checkpoints of a different one cannot be restored."""
        self._critic = critic or {}
        require_owned()
        self._checkpoints = (output_dir / "checkpoints").resolve()
        self._exports = (output_dir / "exports").resolve()
        self._committed_file = self._checkpoints / "critic_committed.json"
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        self.committed = self._read_committed()
        for folder in self._checkpoints.glob("*/"):
            finish_publishing(folder / "critic")

    def _read_committed(self) -> list[str]:
        if not self._committed_file.exists():
            return []
        try:
            committed = list(json.loads(self._committed_file.read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):
            committed = [None]
        if not all(map(is_checkpoint_id, committed)):  # a restored checkpoint is committed again
            log.warning("%s is damaged and is written anew with the next commit", self._committed_file)
            return []
        return committed

    @property
    def last_committed(self) -> str | None:
        return self.committed[-1] if self.committed else None

    def save(self, checkpoint_id: str, critic_step: int, write: Callable[[Path], None]) -> CheckpointRecord:
        """Save a checkpoint durably; ``write`` fills a directory. Replaces an earlier checkpoint of that id.

        Raises:
            ProtocolError: STORAGE if the disk refuses; earlier checkpoints stay whole.
        """
        self._require_owned()
        target = self._folder(checkpoint_id)
        with _published(target) as directory:
            write(directory)
            record = CheckpointRecord(critic_step, file_digests(directory), self._critic)
            (directory / RECORD).write_text(json.dumps(asdict(record), indent=1))
        for folder in (self._checkpoints, self._checkpoints.parent):  # before an older one is deleted
            fsync(folder)
        return read_record(target)

    def export(self, checkpoint_id: str, write: Callable[[Path], None]) -> Path:
        """Write a directory for other programs. Only a commit with ``keep=0`` removes it."""
        self._require_owned()
        target = self._exports / checkpoint_id / "critic"
        with _published(target) as directory:
            write(directory)
        return target

    def verified(self, checkpoint_id: str, digests: dict[str, str] | None) -> tuple[Path, CheckpointRecord]:
        """The directory of a checkpoint whose files are as saved and as in ``digests``, without any other file.

        Raises:
            ProtocolError: NOT_FOUND or CONFLICT.
        """
        directory = self._require(checkpoint_id)
        try:
            record = read_record(directory)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(Code.CONFLICT, f"checkpoint {checkpoint_id} is damaged: {RECORD}") from error
        if missing := self._critic.keys() - record.critic.keys() - {REWARD_MODEL}:
            raise ProtocolError(
                Code.CONFLICT,
                f"checkpoint {checkpoint_id} was saved by another version, which did not record {min(missing)}: resume with "
                "that version",
            )
        for name, value in self._critic.items():
            if (was := record.critic.get(name, value)) != value:
                raise ProtocolError(
                    Code.CONFLICT,
                    f"checkpoint {checkpoint_id} is of a critic with {name} {was}, this one has {value}: start it as it was",
                )
        if digests is not None and digests != record.digests:
            differing = sorted(
                name for name in {*digests, *record.digests} if digests.get(name) != record.digests.get(name)
            )
            raise ProtocolError(
                Code.CONFLICT, f"checkpoint {checkpoint_id} is not the one asked for: {', '.join(differing[:3])} differ"
            )
        if damaged := deviations(directory, record.digests, besides=[RECORD]):
            raise ProtocolError(Code.CONFLICT, f"checkpoint {checkpoint_id} is damaged: {', '.join(damaged[:3])}")
        return directory, record

    def commit(self, checkpoint_id: str, keep: int | None) -> list[str]:
        """Record that actor and critic have saved the checkpoint. With ``keep``, remove all critic checkpoints of the run except
        its last ``keep`` committed ones.

        Checkpoints of other runs in the folder stay. ``keep=0`` removes everything of the run, exports included.

        Returns:
            The ids that were pruned.
        """
        self._require_owned()
        if keep != 0:
            self._require(checkpoint_id)
        run = run_of(checkpoint_id)
        others = [known for known in self.committed if run_of(known) != run]
        mine = [known for known in self.committed if run_of(known) == run]
        if keep is None and checkpoint_id in mine:  # restored: prune the now useless later ones first
            place = mine.index(checkpoint_id)
            mine = mine[place + 1 :] + mine[:place]
        mine = [known for known in mine if known != checkpoint_id] + [checkpoint_id]
        committed = others + (mine if keep is None else mine[-keep:] if keep else [])
        space = Space.of(self._checkpoints)
        try:
            write_atomically(self._committed_file, json.dumps(committed).encode())
        except OSError as error:
            raise _storage_error(error, space) from error
        self.committed = committed
        if keep is None:
            return []
        pruned = [
            saved.parent
            for saved in sorted(self._checkpoints.glob("*/critic"))
            if run_of(saved.parent.name) == run and saved.parent.name not in committed
        ]
        if keep == 0:
            pruned += [export.parent for export in self._exports.glob("*/critic") if run_of(export.parent.name) == run]
        for folder in pruned:
            try:
                shutil.rmtree(folder / "critic")
                if not any(folder.iterdir()):
                    folder.rmdir()
            except OSError as error:  # another process may be reading it; the next commit tries again
                log.warning("the old checkpoint %s cannot be deleted now: %s", folder, error)
        return [folder.name for folder in pruned]

    def _require_owned(self) -> None:
        try:
            require_owned(self._checkpoints, self._exports)
        except UserError as error:
            log.error("%s", error)
            raise ProtocolError(
                Code.STORAGE, "the server can no longer write to its folder; its log says why"
            ) from error

    def _folder(self, checkpoint_id: str) -> Path:
        return self._checkpoints / checkpoint_id / "critic"

    def _require(self, checkpoint_id: str) -> Path:
        directory = self._folder(checkpoint_id)
        if not (directory / RECORD).exists():
            raise ProtocolError(
                Code.NOT_FOUND,
                f"this server has no checkpoint {checkpoint_id}: start it with the run.output_dir that holds it",
            )
        return directory


def read_record(directory: Path) -> CheckpointRecord:
    """Read the record of a checkpoint.

    Raises:
        OSError, ValueError, TypeError, AttributeError, RecursionError: the record cannot be read or is invalid.
    """
    if not (directory / RECORD).is_file():
        raise OSError(f"{RECORD} is no file")
    record = CheckpointRecord(**json.loads((directory / RECORD).read_bytes()))
    if not (type(record.critic_step) is int and isinstance(record.digests, dict) and isinstance(record.critic, dict)):
        raise TypeError(f"{RECORD} is no record of a checkpoint")
    return record


@contextmanager
def _published(target: Path) -> Iterator[Path]:
    """Publish the yielded directory as ``target``. Raise :class:`ProtocolError` STORAGE if the disk refuses."""
    space = Space.of(target)
    try:
        with published(target) as beside:
            beside.mkdir()
            yield beside
    except STORAGE_ERRORS as error:
        if storage_failure(error) is None:
            raise
        raise _storage_error(error, space) from error


def _storage_error(error: BaseException, space: Space) -> ProtocolError:
    return ProtocolError(
        Code.STORAGE,
        f"the checkpoint could not be saved ({storage_failure(error, space)}): make room; checkpoints saved before are whole",
    )
