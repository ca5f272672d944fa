"""Sends the trainer's weights in buckets, and checks at the receiver that no tensor is lost or damaged."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from nemo_style_rlhf.generation.interface import ProbeTarget, TransferError, WeightUpdate
from nemo_style_rlhf.models.digests import tensor_bytes

BUCKET_BYTES = 256 * 2**20
"""A bucket is sent as soon as it holds this many bytes, so that no more than the largest bucket is ever in memory."""


SUMMED_BYTES = 2**25
"""Bytes of a tensor that are summed at a time; the sum needs three times as much memory."""


class StreamDigest:
    """XXH3 over the names, dtypes, shapes and bits of a stream of tensors; both ends keep one.

    It guards against mistakes, not against attackers: SHA-256 would take as long as the transfer itself. A tensor on a GPU is
    represented by its :func:`word_sums`, computed there.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            self._digest.update(tensor_bytes(tensor if tensor.device.type == "cpu" else word_sums(tensor)))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def word_sums(tensor: Tensor) -> Tensor:
    """int64 [2] on the device of ``tensor``: the sum of its 8-byte words, and the sum of each word times its position, both
    modulo 2^64.

    A changed word changes the sums, and so does almost every exchange of two words. The bits need no copy to the host.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, len(data), SUMMED_BYTES):
        part = data[start : start + SUMMED_BYTES]
        words = torch.cat([part, part.new_zeros(-len(part) % 8)]).view(torch.int64)
        position = torch.arange(start // 8, start // 8 + len(words), device=words.device)
        sums += torch.stack([words.sum(), (words * position).sum()])
    return sums


class OwnWeights:
    """A :class:`WeightUpdate` from the tensors of this process. With ZeRO-3, only one bucket at a time is gathered."""

    digest = ""

    def __init__(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: ProbeTarget) -> None:
        self.version = version
        self.probe = probe
        self._weights = weights

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        digest = StreamDigest()
        for bucket in buckets(self._weights, BUCKET_BYTES):
            digest.update(bucket)  # before the bucket is sent
            yield bucket
            bucket.clear()  # before the next bucket is filled
        self.digest = digest.hexdigest()

    def skip_rest(self) -> None:
        """Read and forget the remaining tensors: other ranks send their shards of them, and wait for this one."""
        for _ in self._weights:
            pass


def shapes_of(weights: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    """The tensors that every update must bring, by name."""
    return {name: tuple(tensor.shape) for name, tensor in weights}


def received(update: WeightUpdate, shapes: dict[str, tuple[int, ...]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The buckets of ``update``, each counted before the caller loads it, since a failed load can kill an engine.

    Args:
        shapes: names and shapes of the tensors that must arrive, each once.

    Raises:
        TransferError: a tensor is missing, unknown, repeated or of another shape, or the digest differs.
    """
    missing, digest = set(shapes), StreamDigest()
    for bucket in update.buckets():
        _count(bucket, missing, shapes)
        digest.update(bucket)
        yield bucket
    if missing:
        raise TransferError(f"weight transfer: {len(missing)} tensors are missing, {min(missing)} among them")
    if (arrived := digest.hexdigest()) != update.digest:
        raise TransferError(
            f"weight transfer: sent {update.digest[:12]}, received {arrived[:12]}: a tensor is stale or damaged"
        )


def _count(bucket: Sequence[tuple[str, Tensor]], missing: set[str], shapes: dict[str, tuple[int, ...]]) -> None:
    """Remove the tensors of ``bucket`` from ``missing``. A separate function, so that no local variable keeps a tensor."""
    for name, tensor in bucket:
        if name not in missing:
            reason = "arrived twice" if name in shapes else "is unknown to the generator"
            raise TransferError(f"weight transfer: {name} {reason}")
        if tuple(tensor.shape) != shapes[name]:
            raise TransferError(f"weight transfer: {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        missing.remove(name)


def buckets(weights: Iterable[tuple[str, Tensor]], enough: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors in order; a bucket ends with the tensor that brings it to ``enough`` bytes."""
    bucket: list[tuple[str, Tensor]] = []
    for pair in weights:
        bucket.append(pair)
        del pair
        if sum(tensor.nbytes for _, tensor in bucket) >= enough:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
