"""SHA-256 digests by which two processes compare tokenizers, models, rows and tensors."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from nemo_style_rlhf.checkpoint.files import samples


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of the vocabulary (token to id, added tokens included) and of how a fixed text is split.

    Chat template and pad token do not count: a reward model's tokenizer may differ in them.
    """
    probe = "The quick brown fox, 1234567890!\n\tÄöü 漢字 <|x|>  two  spaces"
    identity = {"vocabulary": sorted(tokenizer.get_vocab().items()), "probe": tokenizer.encode(probe)}
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


WEIGHT_FILES = ("*.safetensors", "*.bin")


def model_fingerprint(path: str) -> str:
    """Identify the model in a local folder, independent of the folder's path, by its config and by sizes and sampled bytes of
    its weight files, since reading them whole takes minutes. A hub name is its own fingerprint."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(file for pattern in ("config.json", *WEIGHT_FILES) for file in folder.glob(pattern)):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        for sample in samples(file):
            digest.update(sample)
    return f"sha256 {digest.hexdigest()[:16]}"


def rows_fingerprint(rows: Iterable[object]) -> str:
    """Identify these rows in this order by their number and a digest of their ``repr``."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        digest.update(repr(row).encode())
        count += 1
    return f"{count} rows, sha256 {digest.hexdigest()[:16]}"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bits of ``tensor``, without a copy if it is a contiguous CPU tensor."""
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of names, dtypes, shapes and bits, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def module_digest(module: nn.Module) -> str:
    return tensors_digest(sorted(module.state_dict().items()))
