"""Copies the content of DeepSpeed's checkpoint files to host memory, so that training can continue while they are written."""

import copy
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map

from nemo_style_rlhf.engine.files import DataFiles

FOLDER = Path("snapshot")


class Snapshot:
    """The files of a checkpoint that one rank writes."""

    def __init__(self) -> None:
        self.files: dict[Path, Any] = {}
        """State dicts by file; their tensors are private copies in host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they will be in the files."""
        leaves = (leaf for state in self.files.values() for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        return sum({leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}.values())

    def write(self, directory: Path) -> None:
        """Write the files. Call this once: it drops the copies, also after an error, since the traceback would keep them.

        Raises:
            OSError: a file cannot be written, or its folder was removed, so that the checkpoint would be partial.
        """
        targets = {directory / path: state for path, state in self.files.items()}
        try:
            directory.mkdir(exist_ok=True)
            for target in targets:
                target.parent.mkdir(parents=True, exist_ok=True)
            for target, state in targets.items():
                target.touch()  # an OSError if the folder is missing; torch's own error would not be one
                torch.save(state, target)
            for target in targets:
                target.stat()
        except BaseException as error:
            met: BaseException | None = error
            while met is not None:
                traceback.clear_frames(met.__traceback__)
                met = met.__context__
            raise
        finally:
            targets.clear()
            self.drop()

    def drop(self) -> None:
        self.files.clear()


class InMemory(DataFiles):
    """Replaces DeepSpeed's own writer, and fills a snapshot."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._snapshot = Snapshot()

    def taken(self) -> Snapshot:
        """The snapshot of everything saved since the last call."""
        taken, self._snapshot = self._snapshot, Snapshot()
        return taken

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        self._snapshot.files[Path(path).relative_to(FOLDER)] = host_copy(state_dict)


def host_copy(state: Any) -> Any:
    """``state`` with its tensors copied to host memory. Tensors that share a storage, such as views of one flat tensor, share its
    copy."""
    storages: dict[int, UntypedStorage] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        storage = leaf.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = UntypedStorage(storage.nbytes()).copy_(storage)
        there = torch.empty(0, dtype=leaf.dtype)
        return there.set_(storages[storage._cdata], leaf.storage_offset(), leaf.shape, leaf.stride())

    return tree_map(copied, state, is_leaf=lambda node: isinstance(node, Size))
