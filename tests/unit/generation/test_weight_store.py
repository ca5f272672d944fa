"""A published version is loaded whole, or refused: no damage to its files reaches a generator."""

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_style_rlhf.errors import StorageError
from nemo_style_rlhf.generation import transfer
from nemo_style_rlhf.generation.interface import ProbeTarget, TransferError
from nemo_style_rlhf.generation.transfer import OwnWeights, received
from nemo_style_rlhf.generation.weight_store import MANIFEST, PublishedWeights, SentWeights, WeightStore

Weights = dict[str, Tensor]
PROBE = ProbeTarget(((3, 4, 5), (6, 7)), (torch.tensor([-0.1, -1e-30]), torch.tensor([-3.0])), 1e-3)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files for each version."""
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 256)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    store = WeightStore(tmp_path / "weights")
    yield store
    store.close()


def weights_of(seed: int) -> Weights:
    """Tensors of several dtypes and shapes; ``first`` and ``second`` share theirs, and lie in different files or in one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "first": torch.randn(9, 5, generator=generator),
        "beside": torch.randn(9, 5, generator=generator),
        "embedding": torch.randn(33, 8, generator=generator).bfloat16(),
        "second": torch.randn(9, 5, generator=generator),
        "bias": torch.randn(3, generator=generator),
        "scale": torch.randn((), generator=generator),
        "half": torch.randn(4, 7, generator=generator).half(),
    }
    return weights


def publish(store: WeightStore, version: int, weights: Weights) -> Path:
    return store.publish(OwnWeights(version, iter(weights.items()), PROBE)).folder


def load(folder: Path, weights: Weights, *, sent: bool = False) -> Weights:
    """Return the tensors that a generator receives which expects the shapes of ``weights``, and has the files in memory if they
    were ``sent``."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    files = {path.name: bytearray(path.read_bytes()) for path in folder.iterdir()}
    version = SentWeights.of(files) if sent else PublishedWeights.open(folder)
    return {name: tensor for bucket in received(version, shapes) for name, tensor in bucket}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(one: Weights, other: Weights) -> bool:
    return list(one) == list(other) and all(
        (each.dtype, each.shape) == (other[name].dtype, other[name].shape)
        and torch.equal(bits(each), bits(other[name]))
        for name, each in one.items()
    )


# --- damages: each changes a version's folder; ``older`` is the whole version before it --------------------------------


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part_*.safetensors"))


def flip_a_bit(folder: Path, older: Path, chance: random.Random) -> None:
    path = chance.choice(parts(folder))
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")  # the tensors follow the length of the head, and the head
    content[chance.randrange(start, len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def drop_from_a_file(folder: Path, older: Path, chance: random.Random) -> None:
    path = chance.choice(parts(folder))
    tensors = load_file(path)
    del tensors[chance.choice(sorted(tensors))]
    save_file(tensors, path)


def drop_from_the_manifest(folder: Path, older: Path, chance: random.Random) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    names = chance.choice([names for names in manifest["tensors"] if names])
    names.remove(chance.choice(names))
    (folder / MANIFEST).write_text(json.dumps(manifest))


def swap_two_tensors(folder: Path, older: Path, chance: random.Random) -> None:
    one, other = chance.sample(["first", "beside", "second"], 2)
    held = {name: (path, tensor) for path in parts(folder) for name, tensor in load_file(path).items()}
    for name, source in ((one, other), (other, one)):
        path = held[name][0]
        save_file(load_file(path) | {name: held[source][1]}, path)


def take_an_older_file(folder: Path, older: Path, chance: random.Random) -> None:
    shutil.copyfile(chance.choice(parts(older)), chance.choice(parts(folder)))


def take_the_older_twin(folder: Path, older: Path, chance: random.Random) -> None:
    path = chance.choice(parts(folder))
    shutil.copyfile(older / path.name, path)


def take_the_older_manifest(folder: Path, older: Path, chance: random.Random) -> None:
    shutil.copyfile(older / MANIFEST, folder / MANIFEST)


def truncate(folder: Path, older: Path, chance: random.Random) -> None:
    path = chance.choice([*parts(folder), folder / MANIFEST])
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def remove(folder: Path, older: Path, chance: random.Random) -> None:
    chance.choice([*parts(folder), folder / MANIFEST]).unlink()


DAMAGES: list[Callable[[Path, Path, random.Random], None]] = [
    flip_a_bit, drop_from_a_file, drop_from_the_manifest, swap_two_tensors, take_an_older_file, take_the_older_twin,
    take_the_older_manifest, truncate, remove,
]  # fmt: skip


@pytest.mark.parametrize("sent", [False, True])
def test_100_of_100_damages_are_refused(store: WeightStore, sent: bool) -> None:
    weights = weights_of(1)
    older, folder = publish(store, 1, weights_of(0)), publish(store, 2, weights)
    assert len(parts(folder)) >= 3
    refused = []
    for number in range(100):
        damaged = folder.with_name(str(100 + number))
        shutil.copytree(folder, damaged)
        damage = DAMAGES[number % len(DAMAGES)]
        damage(damaged, older, random.Random(number))
        try:
            load(damaged, weights, sent=sent)
        except TransferError:
            refused.append(damage)
        else:
            pytest.fail(f"damage {number}, {damage.__name__}, was not noticed")
        assert same_bits(load(folder, weights, sent=sent), weights)
    assert len(refused) == 100 and set(refused) == set(DAMAGES)


@pytest.mark.parametrize("sent", [False, True])
def test_a_flipped_bit_in_a_files_head_is_refused_or_changes_nothing(store: WeightStore, sent: bool) -> None:
    """A flip in the padding, or one that only renames a tensor which nobody asks for, does no harm."""
    weights = weights_of(3)
    folder = publish(store, 1, weights)
    path = parts(folder)[0]
    whole = path.read_bytes()
    refused = 0
    for place in range(8 + int.from_bytes(whole[:8], "little")):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            assert same_bits(load(folder, weights, sent=sent), weights), f"a flip in byte {place} was not noticed"
        except TransferError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"{}", b'{"version": 1}', b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "no text", "nothing", "incomplete", "deep"],
)
def test_a_manifest_that_is_none_is_refused(store: WeightStore, content: bytes) -> None:
    folder = publish(store, 1, weights_of(0))
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(TransferError, match="holds no whole version of the weights"):
        PublishedWeights.open(folder)


@pytest.mark.parametrize("key", ["version", "digest", "probe", "tensors"])
@pytest.mark.parametrize("value", [None, 5, "x", [5], [[5]], {}, {"sequences": 5}])
def test_a_manifest_with_a_value_of_another_kind_is_refused(store: WeightStore, key: str, value: object) -> None:
    weights = weights_of(0)
    folder = publish(store, 1, weights)
    manifest = json.loads((folder / MANIFEST).read_text())
    if (key, value) == ("version", 5):
        value = "5"  # a number is what a version is
    (folder / MANIFEST).write_text(json.dumps(manifest | {key: value}))
    with pytest.raises(TransferError):
        load(folder, weights)


def test_the_probe_travels_with_its_bits(store: WeightStore) -> None:
    probe = PublishedWeights.open(publish(store, 1, weights_of(0))).probe
    assert (probe.sequences, probe.max_gap) == (PROBE.sequences, PROBE.max_gap)
    assert all(map(torch.equal, probe.logprobs, PROBE.logprobs))


def test_tensors_that_are_views_are_stored_by_their_values(store: WeightStore) -> None:
    fused = torch.randn(6, 4)
    weights = {
        "transposed": torch.randn(5, 3).T,
        "upper": fused[:2],
        "lower": fused[2:],
        "column": torch.randn(5, 3)[:, 1],
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    assert same_bits(load(publish(store, 1, weights), weights), weights)


def test_only_their_user_can_open_folders_and_files(store: WeightStore, tmp_path: Path) -> None:
    folder = publish(store, 1, weights_of(0))
    found = {path: path.stat().st_mode & 0o777 for path in [tmp_path / "weights", *(tmp_path / "weights").rglob("*")]}
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *(path.name for path in parts(folder))}


def test_other_versions_are_removed(store: WeightStore, tmp_path: Path) -> None:
    weights = weights_of(0)
    for version in range(5):
        publish(store, version, weights)
    store.keep({1, 4})
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1", "4"]
    assert same_bits(load(tmp_path / "weights" / "4", weights), weights)
    store.close()
    assert not (tmp_path / "weights").exists()


def test_a_version_that_is_removed_while_it_is_read_is_whole_or_refused(store: WeightStore) -> None:
    weights = weights_of(0)
    update = PublishedWeights.open(publish(store, 1, weights))
    stream = received(update, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    ((name, tensor), *_) = next(stream)
    store.keep(())
    assert torch.equal(tensor, weights[name])  # files that are open stay
    with pytest.raises(TransferError, match="weights version 1 is incomplete or damaged"):
        list(stream)


def test_what_a_killed_trainer_left_is_removed(store: WeightStore, tmp_path: Path) -> None:
    publish(store, 1, weights_of(0))
    (tmp_path / "weights" / "2").mkdir()  # killed while it published
    (tmp_path / "weights" / "2" / "part_00000.safetensors").write_bytes(b"half")
    successor = WeightStore(tmp_path / "weights")
    assert not list((tmp_path / "weights").iterdir())
    publish(successor, 2, weights_of(0))


def test_tied_and_overlapping_tensors_are_published_each_for_itself(store):
    flat = torch.randn(60)
    weights = {
        "embed": flat[:40].view(5, 8),
        "head": flat[:40].view(5, 8),
        "overlapping": flat[30:],
        "columns": flat[:40].view(5, 8).t(),
    }
    folder = publish(store, 1, weights)
    assert same_bits(load(folder, weights), {name: tensor.contiguous() for name, tensor in weights.items()})


def test_a_store_without_room_says_so_and_publishes_nothing(tmp_path: Path) -> None:
    """It still reads all weights: under ZeRO-3, other ranks would wait for ever."""
    store = WeightStore(tmp_path / "store")
    weights = iter([(f"weight {number}", torch.zeros(1000)) for number in range(3)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"store/1 cannot be written .*: make room"):
            store.publish(OwnWeights(1, weights, PROBE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(weights)
    with pytest.raises(TransferError):
        PublishedWeights.open(store.root / "1")


def test_a_pinned_version_outlives_those_that_are_not_kept(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    for version in (1, 2, 3):
        publish(store, version, weights_of(0))
    assert store.pinned(1).version == 1
    store.keep([3])
    assert sorted(folder.name for folder in store.root.iterdir()) == ["1", "3"]
    store.unpin(1)
    store.keep([3])
    assert [folder.name for folder in store.root.iterdir()] == ["3"]
