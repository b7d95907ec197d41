"""Encoded checkpoints: the same bits in fewer bytes, whole with all that they begin with, or not a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from blake3 import blake3
from torch import Tensor

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.commit import newest_verified, read_manifest
from shoal.checkpoint.encoding import EncodedObject
from shoal.checkpoint.inspect import compare, verify
from shoal.checkpoint.load import read_all, read_into
from shoal.checkpoint.objects import Places
from shoal.checkpoint.planes import CHUNK, Stream
from shoal.checkpoint.weights import export
from shoal.errors import CorruptCheckpoint, VerificationFailed
from shoal.state import Target
from tests.checkpoint.states import leftovers, same, save, saver_for, state_of
from tests.checkpoint.test_reshard import Ranks, numbers

WAYS = ("none", "planes", "deltas")
FULL_EVERY = 3


def trained(step: int, *, numel: int = 20_000) -> dict[str, Tensor]:
    """Weights that move by a thousandth a step, moments that do not depend on the step before, a frozen tensor."""
    draw = torch.Generator().manual_seed(0)
    weight, direction = torch.randn(2, numel, generator=draw) * 0.02
    moment = torch.randn(numel, generator=torch.Generator().manual_seed(step))
    return {
        "model/w": weight * (1 + 1e-3 * step * direction),
        "model/half": (weight * (1 + 1e-2 * step)).to(torch.bfloat16),
        "model/frozen": direction.clone(),
        "optimizer/exp_avg/w": moment * 1e-3,
        "optimizer/exp_avg_sq/w": moment.square() * 1e-6,
        "optimizer/step/w": torch.tensor(float(step)),
    }


def manifest_of(directory: Path, step: int) -> manifests.Manifest:
    return read_manifest(Places(directory).step(step))


def own_bytes(manifest: manifests.Manifest) -> int:
    """Of the objects that hold boxes, without what these begin with."""
    own = {box.object for tensor in manifest.tensors for box in tensor.boxes}
    return sum(manifest.objects[digest] for digest in own)


@pytest.mark.parametrize("compress", WAYS[1:])
def test_what_is_saved_is_read_bit_by_bit(tmp_path, compress):
    """All element types, empty tensors and scalars, over more saves than a chain is long."""
    saver = saver_for(tmp_path, compress=compress, full_every=FULL_EVERY, keep=9)
    for step in range(1, 6):
        assert save(saver, step).error is None
    for step in range(1, 6):
        manifest = manifest_of(tmp_path, step)
        assert set(manifest.encoded) == set(manifest.objects)
        assert same(read_all(manifest, tmp_path), state_of(step))
    assert (newest_verified(tmp_path)[1], leftovers(tmp_path)) == ([], [])


def test_each_way_takes_fewer_bytes_than_the_one_before(tmp_path):
    """A report counts the bytes of the state, and those of the objects."""
    bytes_of = {}
    for compress in WAYS:
        saver = saver_for(tmp_path / compress, compress=compress, object_bytes=1 << 20)
        first, second = (save(saver, step, trained(step)) for step in (1, 2))
        assert first.state_bytes == second.state_bytes == sum(t.nbytes for t in trained(1).values())
        assert second.bytes_written + second.bytes_reused == own_bytes(manifest_of(tmp_path / compress, 2))
        bytes_of[compress] = second.bytes_written + second.bytes_reused
    assert bytes_of["planes"] < 0.85 * bytes_of["none"]
    assert bytes_of["deltas"] < 0.75 * bytes_of["none"]


def test_a_checkpoint_without_compression_is_the_file_it_was(tmp_path):
    """Format 2, no key more: an earlier version reads it; it does not read one that is encoded."""
    save(saver_for(tmp_path), 1)
    content = Places(tmp_path).manifest(1).read_bytes()
    assert b'"format_version":2' in content
    assert b"encoded" not in content
    save(saver_for(tmp_path, compress="planes"), 2)
    assert b'"format_version":3' in Places(tmp_path).manifest(2).read_bytes()
    assert same(read_all(manifest_of(tmp_path, 1), tmp_path), state_of(1))


EQUAL = {
    "zeros over several objects": lambda _: {"model/w": torch.zeros(2000, 41)},
    "two shapes": lambda by: {"model/a": by * numbers((16, 64)), "model/b": by * numbers((64, 16))},
    "two types": lambda by: {"model/a": by * numbers((32, 32)), "model/b": (by * numbers((32, 32))).view(torch.int32)},
    "zeros of all kinds": lambda _: {
        **{f"model/{i}": torch.zeros(shape) for i, shape in enumerate([(64, 16), (16, 64), (1024,), (3, 1024)])},
        "model/half": torch.zeros(64, 32, dtype=torch.bfloat16),
        "optimizer/exp_avg/0": torch.zeros(64, 16),
    },
}


@pytest.mark.parametrize("compress", WAYS[1:])
@pytest.mark.parametrize("what", EQUAL)
def test_boxes_of_equal_bits_are_one_object_and_come_back_each_as_it_was(tmp_path, what, compress):
    """Other shapes, types and offsets; whole, and the rows and columns of another layout; with nothing changed, too."""
    saver = saver_for(tmp_path, compress=compress)
    for step, scale in enumerate([1, 3, 3], start=1):
        state = EQUAL[what](scale)
        assert save(saver, step, state).error is None
        manifest = manifest_of(tmp_path, step)
        boxes = [box for entry in manifest.tensors for box in entry.boxes]
        assert len({box.object for box in boxes}) < len(boxes)
        assert same(read_all(manifest, tmp_path), state)
        for dim in (0, 1):
            parts = {n: part_of(tensor, dim) for n, tensor in state.items() if tensor.dim() == 2}
            read_into(manifest, tmp_path, parts, strict=False)
            for name, (target,) in parts.items():
                kept = state[name].narrow(dim, target.offset[dim], target.tensor.shape[dim])
                assert torch.equal(target.tensor, kept)


def part_of(tensor: Tensor, dim: int) -> list[Target]:
    """The middle half of it along `dim`, to be read."""
    size = tensor.shape[dim]
    offset = tuple(size // 4 if each == dim else 0 for each in range(tensor.dim()))
    return [Target(torch.full_like(tensor, 7).narrow(dim, size // 4, size // 2), tuple(tensor.shape), offset)]


def needed(manifest: manifests.Manifest) -> int:
    """Objects that a box needs at most."""
    return 2 if any(manifest.encoded.values()) else 1


def test_what_a_checkpoint_begins_with_stays(tmp_path):
    """One in `full_every` begins with none; `keep` counts checkpoints, and deletes no object that one needs."""
    saver = saver_for(tmp_path, compress="deltas", full_every=FULL_EVERY, keep=1)
    counts = []
    for step in range(1, 8):
        save(saver, step, trained(step))
        assert Places(tmp_path).steps() == [step]
        assert leftovers(tmp_path) == []
        manifest = manifest_of(tmp_path, step)
        assert same(read_all(manifest, tmp_path), trained(step))
        counts.append(needed(manifest))
    assert counts == [1, 2, 2, 1, 2, 2, 1]


def test_what_did_not_change_is_not_written_again(tmp_path):
    """Neither its numbers nor their difference."""
    saver = saver_for(tmp_path, compress="deltas")
    save(saver, 1, trained(1))
    report = save(saver, 2, trained(1))
    assert report.bytes_written == 0
    assert manifest_of(tmp_path, 2).objects == manifest_of(tmp_path, 1).objects


def test_an_object_may_begin_with_none_between_others_that_do(tmp_path):
    """Numbers that are others for a while, and near again: each object begins with one that is kept."""
    near, far = trained(1)["model/w"], torch.randn(20_000, generator=torch.Generator().manual_seed(9))
    saver = saver_for(tmp_path, compress="deltas", full_every=9, keep=1, object_bytes=1 << 20)
    for step, weight in enumerate([near, far, near * 1.0001, far * 1.0001, far * 1.0002], start=1):
        state = {"model/w": weight, "optimizer/exp_avg/w": near * (1 + 1e-4 * step)}
        assert save(saver, step, state).error is None
        assert newest_verified(tmp_path)[1] == []
        assert same(read_all(manifest_of(tmp_path, step), tmp_path), state)


def test_after_a_failed_save_nothing_begins_with_it(tmp_path, monkeypatch):
    """A full disk: the next checkpoint is whole by itself."""
    saver = saver_for(tmp_path, compress="deltas")
    save(saver, 1, trained(1))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shoal.checkpoint.objects.os.write", full)
        assert "No space left" in str(save(saver, 2, trained(2)).error)
    assert save(saver, 3, trained(3)).error is None
    assert needed(manifest_of(tmp_path, 3)) == 1
    assert same(read_all(manifest_of(tmp_path, 3), tmp_path), trained(3))


@pytest.mark.parametrize("moved", [1, 2], ids=["the same numbers", "others"])
@pytest.mark.parametrize("gone", [False, True], ids=["flipped", "missing"])
def test_nothing_begins_with_a_damaged_object(tmp_path, moved, gone):
    """What has changed since it was written costs no checkpoint: the next one begins with none, and says so."""
    saver = saver_for(tmp_path, compress="deltas", full_every=9, object_bytes=1 << 20)
    save(saver, 1, {"model/w": trained(1)["model/w"]})
    (path,) = Places(tmp_path).objects.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    if gone:
        path.unlink()
    report = save(saver, 2, {"model/w": trained(moved)["model/w"]})
    assert report.committed
    assert f"{path} {'is missing' if gone else 'does not hash'}" in str(report.error)
    manifest, _ = newest_verified(tmp_path)
    assert manifest is not None
    assert (manifest.step, needed(manifest)) == (2, 1)
    assert same(read_all(manifest, tmp_path), {"model/w": trained(moved)["model/w"]})
    assert save(saver, 3, {"model/w": trained(3)["model/w"]}).error is None
    assert needed(manifest_of(tmp_path, 3)) == 2
    assert same(read_all(manifest_of(tmp_path, 3), tmp_path), {"model/w": trained(3)["model/w"]})


def test_a_damaged_base_damages_what_begins_with_it(tmp_path):
    """Flipped bits of every object that the newest checkpoint needs are noticed; a missing one, too."""
    saver = saver_for(tmp_path, compress="deltas", full_every=4, object_bytes=1 << 20)
    for step in (1, 2, 3):
        save(saver, step, trained(step))
    newest, first = manifest_of(tmp_path, 3), manifest_of(tmp_path, 1)
    assert newest.objects.keys() & first.objects.keys()
    for digest in newest.objects:
        path = Places(tmp_path).object(digest)
        whole = path.read_bytes()
        for bit in random.Random(0).sample(range(8 * len(whole)), 5):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            found, problems = newest_verified(tmp_path)
            assert found is None or found.step < 3
            assert any(str(path) in problem for problem in problems)
        path.unlink()
        (missing,) = [finding for finding in verify(tmp_path, 3) if "is missing" in finding.sentence]
        assert missing.tensors
        path.write_bytes(whole)
    assert newest_verified(tmp_path)[1] == []


def test_a_checkpoint_counts_although_the_next_cannot_begin_with_it(tmp_path, monkeypatch):
    """No memory for what later saves begin with: the save is reported, and the next one begins with none."""
    saver = saver_for(tmp_path, compress="deltas")

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("shoal.checkpoint.encoding.np.empty", no_memory)
        report = save(saver, 1, trained(1))
    assert report.committed
    assert "no memory" in str(report.error)
    for step, count in ((2, 1), (3, 2)):
        assert save(saver, step, trained(step)).error is None
        assert needed(manifest_of(tmp_path, step)) == count


def test_a_closed_saver_keeps_no_numbers(tmp_path):
    """They are as many as the state."""
    saver = saver_for(tmp_path, compress="deltas")
    save(saver, 1, trained(1))
    assert saver._encoder._bases is not None
    saver.close()
    assert saver._encoder._bases is None


def test_a_stream_is_opened_once_however_many_chunks_are_read(tmp_path, monkeypatch):
    """Its table is as long as it has chunks."""
    state = {"model/w": torch.randn(5 * CHUNK)}
    saver = saver_for(tmp_path, compress="deltas", object_bytes=64 << 20)
    for step in (1, 2):
        save(saver, step, {"model/w": state["model/w"] * (1 + 1e-4 * step)})
    opened: list[int] = []
    begin = Stream.__init__
    monkeypatch.setattr(
        Stream, "__init__", lambda self, *given, **named: opened.append(1) or begin(self, *given, **named)
    )
    read_all(manifest_of(tmp_path, 2), tmp_path)
    assert len(opened) == 2


def test_no_flip_of_an_encoded_manifest_is_read(tmp_path):
    """Every bit: none of these contents is a manifest."""
    saver = saver_for(tmp_path, compress="deltas", object_bytes=1 << 20)
    for step in (1, 2):
        save(saver, step, {"model/w": trained(step)["model/w"]})
    path = Places(tmp_path).manifest(2)
    content = path.read_bytes()
    assert manifests.decode(content, path).encoded
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(VerificationFailed):
            manifests.decode(bytes(changed), path)


def resealed(content: bytes, change) -> bytes:
    tree = msgspec.json.decode(content)
    del tree["hash"]
    change(tree)
    return manifests.seal(msgspec.json.encode(tree, order="deterministic"))


def cycle(tree) -> None:
    digest = next(iter(tree["encoded"]))
    tree["encoded"][digest] = digest


HOSTILE = {
    "no base": lambda tree: tree["encoded"].update({next(iter(tree["encoded"])): "ab" * 32}),
    "cycle": cycle,
    "base of a base": lambda tree: (
        tree["objects"].update({"ab" * 32: 9, "cd" * 32: 9}),
        tree["encoded"].update({"ab" * 32: "cd" * 32, "cd" * 32: "", next(iter(tree["encoded"])): "ab" * 32}),
    ),
    "no object": lambda tree: tree["encoded"].update({"cd" * 32: ""}),
    "no hash": lambda tree: tree["encoded"].update({next(iter(tree["encoded"])): "zz"}),
    "format": lambda tree: tree.update(format_version=2),
    "nothing encoded": lambda tree: tree.update(encoded={}),
    "larger than it can be": lambda tree: (
        tree["tensors"][0].update(shape=[1 << 28]),
        tree["tensors"][0]["boxes"][0].update(shape=[1 << 28]),
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_that_asks_for_the_impossible_is_refused(tmp_path, what):
    """With a right hash."""
    save(saver_for(tmp_path, compress="planes", object_bytes=1 << 20), 1, {"model/w": trained(1)["model/w"]})
    path = Places(tmp_path).manifest(1)
    content = path.read_bytes()
    assert manifests.decode(resealed(content, lambda tree: None), path).encoded
    with pytest.raises(CorruptCheckpoint):
        manifests.decode(resealed(content, HOSTILE[what]), path)


def test_an_object_that_begins_with_another_than_the_manifest_says_is_refused(tmp_path):
    """Differences from other numbers would be other numbers, in silence."""
    saver = saver_for(tmp_path, compress="deltas", object_bytes=1 << 20)
    for step in (1, 2):
        save(saver, step, {"model/w": trained(step)["model/w"]})
    newest = manifest_of(tmp_path, 2)
    forged = msgspec.structs.replace(newest, encoded=dict.fromkeys(newest.encoded, ""))
    with pytest.raises(CorruptCheckpoint, match="and not with what the manifest names"):
        read_all(forged, tmp_path)


@pytest.mark.parametrize("compress", WAYS[1:])
def test_one_layout_is_loaded_under_another(tmp_path, compress):
    """Four ranks with rows, two saves; read as columns, by runs of a flat buffer, and whole."""
    shape = (16, 12)
    tensors = [{"model/a": numbers(shape) * scale, "optimizer/exp_avg/a": numbers(shape) + scale} for scale in (1, 3)]

    def part(rank: int, state: dict[str, Tensor]):
        return {
            name: [Target(tensor[4 * rank : 4 * rank + 4].clone(), shape, (4 * rank, 0))]
            for name, tensor in state.items()
        }

    ranks = Ranks(tmp_path, compress=compress)
    for step, state in enumerate(tensors, start=1):
        reports, manifest = ranks.save(step, lambda rank, state=state: part(rank, state))
        assert all(report.committed for report in reports.values()), reports
        assert manifest is not None
        assert same(read_all(manifest, tmp_path), state)
    assert manifest is not None
    column = torch.zeros(16, 5)
    read_into(manifest, tmp_path, {"model/a": [Target(column, shape, (0, 3))]}, strict=False)
    assert torch.equal(column, tensors[1]["model/a"][:, 3:8])


def test_a_rank_decodes_the_chunks_that_it_needs(tmp_path, monkeypatch):
    """A quarter of the rows of a box: a quarter of its chunks, and the same of what it begins with."""
    state = {"model/w": torch.randn(4 * CHUNK).view(64, -1)}
    saver = saver_for(tmp_path, compress="deltas", object_bytes=64 << 20)
    save(saver, 1, state)
    moved = {"model/w": state["model/w"] * 1.0001}
    save(saver, 2, moved)
    read: list[int] = []
    chunk = EncodedObject._chunk
    monkeypatch.setattr(
        EncodedObject, "_chunk", lambda self, key, number, like: read.append(number) or chunk(self, key, number, like)
    )
    rows = torch.zeros(16, CHUNK // 16)
    read_into(manifest_of(tmp_path, 2), tmp_path, {"model/w": [Target(rows, (64, CHUNK // 16), (16, 0))]}, strict=False)
    assert torch.equal(rows, moved["model/w"][16:32])
    assert read == [1, 1]


def test_moments_in_8_bits_are_near_and_all_else_is_exact(tmp_path):
    """Weights, counters and small parameters keep their bits; moments are within what is said."""
    state = trained(1) | {"optimizer/exp_avg/small": torch.randn(100)}
    save(saver_for(tmp_path, compress="planes", moments="8bit", object_bytes=1 << 20), 1, state)
    found = read_all(manifest_of(tmp_path, 1), tmp_path)
    narrow = {"optimizer/exp_avg/w": 0.011, "optimizer/exp_avg_sq/w": 0.006}
    for name, tensor in state.items():
        if name in narrow:
            off = (found[name] - tensor).abs().max()
            assert 0 < off < narrow[name] * tensor.abs().max()
        else:
            assert torch.equal(found[name], tensor)


def test_an_exported_file_is_plain(tmp_path):
    """The weights of any checkpoint, and compared they are the same."""
    for compress in WAYS:
        saver = saver_for(tmp_path / compress, compress=compress)
        for step in (1, 2):
            save(saver, step, trained(step))
        export(tmp_path / compress, tmp_path / f"{compress}.safetensors")
        assert compare(tmp_path / compress, tmp_path / "none").differences == []
    hashes = {blake3((tmp_path / f"{compress}.safetensors").read_bytes()).hexdigest() for compress in WAYS}
    assert len(hashes) == 1
