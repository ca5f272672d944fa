"""Sending the trainer's weights in buckets, and the receiver's bookkeeping that no tensor is lost or stale."""

from collections.abc import Iterable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.generation.interface import TransferError, WeightTransport
from nemo_style_rlhf.models.digests import tensor_bytes
from nemo_style_rlhf.models.lora import merged

BUCKET_BYTES = 256 * 2**20
"""A bucket is sent as soon as it holds so much: at no time is there more of the weights than the largest bucket."""


SUMMED_BYTES = 2**25
"""How much of a tensor is summed at a time; what that takes is three times as large."""


class StreamDigest:
    """XXH3 over the names, dtypes, shapes and bits of a stream of tensors; both ends keep one.

    It guards against mistakes, not against people: SHA-256 would take as long as the transfer itself. The bits of a tensor on
    a GPU count as :func:`word_sums` of them, which are taken there.
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
    """int64 [2] on the device of ``tensor``: the sum of its 8-byte words, and that of each times its position, modulo 2^64.

    A changed word changes them, as almost every exchange of two does, and no copy of all bits to the host is needed.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, len(data), SUMMED_BYTES):
        part = data[start : start + SUMMED_BYTES]
        words = torch.cat([part, part.new_zeros(-len(part) % 8)]).view(torch.int64)
        position = torch.arange(start // 8, start // 8 + len(words), device=words.device)
        sums += torch.stack([words.sum(), (words * position).sum()])
    return sums


class TransferManifest:
    """What the receiver expects: every tensor of the checkpoint it was built from, once, in its shape."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._missing: set[str] = set()
        self._digest = StreamDigest()
        self._version = 0

    def begin(self, version: int) -> None:
        self._version = version
        self._missing = set(self._shapes)
        self._digest = StreamDigest()

    def receive(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Count a bucket in; before the caller loads it, since a failed load can kill the engine."""
        for name, tensor in bucket:
            if name not in self._missing:
                reason = "arrived twice" if name in self._shapes else "is unknown to the generator"
                raise TransferError(f"weight transfer: {name} {reason}")
            if tuple(tensor.shape) != self._shapes[name]:
                raise TransferError(
                    f"weight transfer: {name} has shape {tuple(tensor.shape)}, expected {self._shapes[name]}"
                )
            self._missing.remove(name)
        self._digest.update(bucket)

    def finish(self, digest: str) -> int:
        """The version that is now whole."""
        if self._missing:
            raise TransferError(
                f"weight transfer: {len(self._missing)} tensors are missing, {min(self._missing)} among them"
            )
        if (received := self._digest.hexdigest()) != digest:
            raise TransferError(
                f"weight transfer: sent {digest[:12]}, received {received[:12]}: a tensor is stale or damaged"
            )
        return self._version


def policy_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an engine that trains a :class:`PolicyModel`, under their Hugging Face names, adapters merged."""
    weights = map(lambda pair: (pair[0].removeprefix("hf."), pair[1]), engine.named_weights())
    return merged(weights, engine.module.hf)


def send_weights(transport: WeightTransport, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Send ``weights`` as ``version``; the digest is taken here, at the source, before a bucket leaves."""
    digest = StreamDigest()
    transport.begin(version)
    for bucket in buckets(weights, BUCKET_BYTES):
        digest.update(bucket)
        transport.send(bucket)
        bucket.clear()  # before the next one is put together
    transport.finish(digest.hexdigest())


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
