"""Sending the trainer's weights in buckets, and the receiver's bookkeeping that no tensor is lost or stale."""

from collections.abc import Iterable, Iterator, Sequence

import xxhash
from torch import Tensor

from nemo_style_rlhf.engine.engine import Engine
from nemo_style_rlhf.generation.interface import TransferError, WeightTransport
from nemo_style_rlhf.models.digests import tensor_bytes
from nemo_style_rlhf.models.lora import merged

BUCKET_BYTES = 256 * 2**20


class StreamDigest:
    """XXH3 over the names, dtypes, shapes and bits of a stream of tensors; both ends keep one.

    It guards against mistakes, not against people: SHA-256 would take as long as the transfer itself.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, name: str, tensor: Tensor) -> None:
        self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        self._digest.update(tensor_bytes(tensor))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class Manifest:
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
        for name, tensor in bucket:
            self._digest.update(name, tensor)

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
    weights = ((name.removeprefix("hf."), tensor) for name, tensor in engine.named_weights())
    return merged(weights, engine.module.hf)


def send_weights(transport: WeightTransport, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Send ``weights`` as ``version``; the digest is taken here, at the source, before a bucket leaves."""
    digest = StreamDigest()
    transport.begin(version)
    for bucket in buckets(weights, BUCKET_BYTES):
        for name, tensor in bucket:
            digest.update(name, tensor)
        transport.send(bucket)
    transport.finish(digest.hexdigest())


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors in order into buckets of at most ``limit`` bytes; a larger tensor goes alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
