"""Manifests are deterministic, and parsed as if an enemy had written them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.manifest import MAX_STATE_BYTES, BoxEntry, Manifest, TensorEntry, decode, encode, seal
from shoal.checkpoint.tensorfile import boxes_within, tiles
from shoal.errors import CorruptCheckpoint, UsageError, VerificationFailed
from shoal.topology.holding import Box, whole
from tests.checkpoint.cuts import held
from tests.checkpoint.states import light

DIGEST = "ab" * 32
PATH = Path("run/checkpoints/step-00000007/manifest.json")


def entry(offset, shape) -> BoxEntry:
    return BoxEntry(list(offset), list(shape), DIGEST, "0")


def a_manifest(**changes) -> Manifest:
    whole = Manifest(
        step=7,
        generation=0,
        created=1.5,
        tensors=[TensorEntry("model/w", "float32", [4, 2], [entry((0, 0), (2, 2)), entry((2, 0), (2, 2))])],
        objects={DIGEST: 100},
        state={"b": 1, "a": [2**100, None, "x"]},
        layout={},
        writer={"torch": "2"},
    )
    return msgspec.structs.replace(whole, **changes)


def test_a_manifest_survives_the_file():
    """What is decoded equals what was encoded, large integers included."""
    found = decode(encode(a_manifest()), PATH)
    assert found == a_manifest(hash=found.hash)
    assert found.hash


def test_the_order_of_a_mapping_does_not_reach_the_file():
    """Equal manifests are equal bytes."""
    assert encode(a_manifest(state={"a": 1, "b": 2})) == encode(a_manifest(state={"b": 2, "a": 1}))


def changed(path: str, value: object) -> bytes:
    """The file of a manifest in which the value at the dotted `path` is another; its hash is right."""
    tree = msgspec.json.decode(encode(a_manifest()))
    del tree["hash"]
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    at = tree
    for part in way:
        at = at[part]
    at[last] = value
    return seal(msgspec.json.encode(tree))


def body_of(manifest: Manifest) -> bytes:
    """The JSON that is sealed."""
    return encode(manifest).partition(b',"hash":')[0] + b"}"


BAD = {
    "not JSON": b"\x80\x04pickle",
    "empty": b"",
    "nested without end": b"[" * 200_000,
    "nested state": seal(body_of(a_manifest()).replace(b'"state":{', b'"state":{"deep":' + b"[" * 99_999 + b",", 1)),
    "time that no clock shows": changed("created", 1e300),
    "shape without end": changed("tensors.0.shape", [1 << 62, 1 << 62, 0]),
    "dims without end": changed("tensors.0.shape", [1] * 1000),
    "object without end": changed("objects", {DIGEST: 1 << 62}),
    "state of a megabyte": changed("state", {"a": [[]] * (MAX_STATE_BYTES // 3)}),
    "state is a list": changed("state", []),
    "writer is a number": changed("writer", 1),
    "unknown field": changed("surprise", 1),
    "unknown field of a box": changed("tensors.0.boxes.0.surprise", 1),
    "negative step": changed("step", -1),
    "step is text": changed("step", "7"),
    "unknown type": changed("tensors.0.dtype", "object"),
    "other shape": changed("tensors.0.shape", [5, 2]),
    "overlap": changed("tensors.0.boxes.1.offset", [1, 0]),
    "box twice": changed("tensors.0.boxes.1.offset", [0, 0]),
    "box of other dims": changed("tensors.0.boxes.1.offset", [2]),
    "box beyond": changed("tensors.0.boxes.1.shape", [3, 2]),
    "no boxes": changed("tensors.0.boxes", []),
    "object not listed": changed("objects", {}),
    "object too small": changed("objects", {DIGEST: 8}),
    "path for a hash": changed("tensors.0.boxes.0.object", "../" * 20 + "etc/"),
    "hash with a newline": changed("objects", {DIGEST[:-1] + "\n": 100}),
    "one name twice": changed("tensors", msgspec.to_builtins(a_manifest().tensors * 2)),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_manifest_that_cannot_be_is_refused_with_its_path(content):
    """Every lie is a `CorruptCheckpoint` that names the file."""
    with pytest.raises(CorruptCheckpoint, match="step-00000007/manifest"):
        decode(content, PATH)


def test_the_unchanged_manifest_is_accepted():
    """The helper of the test above breaks a manifest only by what it changes."""
    found = decode(changed("step", 7), PATH)
    assert found == a_manifest(hash=found.hash)


def test_another_format_is_no_corruption_and_says_what_to_do():
    """A checkpoint of a later Shoal asks for that Shoal, whatever fields it has."""
    content = msgspec.json.encode({"format_version": 4, "new": 1})
    with pytest.raises(VerificationFailed, match="the format 4, and this Shoal reads up to 3") as caught:
        decode(content, PATH)
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_a_huge_file_is_refused_before_it_is_parsed_and_never_written(tmp_path, monkeypatch):
    """The size is bounded, for the writer too: it says what to change instead of writing what nobody reads."""
    content = encode(a_manifest())
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(UsageError, match=r"raise checkpoint\.object_bytes"):
        encode(a_manifest())
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="larger than 100 bytes"):
        manifests.read(path)


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@light
@given(shapes, st.integers(1, 30), st.data())
def test_exactly_the_boxes_of_a_grid_tile(shape, limit, data):
    """The grid's own boxes pass in any order; without one, or with one moved, they do not."""
    cut = data.draw(st.permutations(list(boxes_within(whole(shape), shape, limit))))
    assert tiles(shape, cut)
    assert not tiles(shape, cut[1:])
    assert not tiles(shape, [*cut, cut[0]])
    if shape:
        moved = Box((cut[0].offset[0] + 1, *cut[0].offset[1:]), cut[0].shape)
        assert not tiles(shape, [moved, *cut[1:]])


@light
@given(st.data(), shapes)
def test_boxes_tile_exactly_when_every_element_is_in_one(data, shape):
    """The oracle counts elements: runs of a flat tensor and any other cut pass, random boxes pass as it says."""
    cut = [box for boxes in data.draw(held(shape, [0])).values() for box in boxes]
    some = data.draw(st.lists(st.sampled_from(cut), max_size=len(cut) + 1)) if cut else []
    for found in (cut, some):
        count = torch.zeros(shape, dtype=torch.int64)
        for box in found:
            count[box.slices] += 1
        once = bool((count == 1).all()) and (count.numel() > 0 or len(found) == 1)
        assert tiles(shape, found) == once


def test_boxes_beyond_a_tensor_do_not_make_up_for_gaps():
    """As many elements as the tensor has, but not its own; and corners that cancel by number, not by place."""
    assert not tiles((4, 4), [Box((0, 0), (4, 2)), Box((0, 2), (2, 2)), Box((4, 2), (2, 2))])
    assert not tiles((4, 4), [Box((0, 0), (2, 4)), Box((0, 0), (2, 4))])
    assert tiles((4, 4), [Box((0, 0), (1, 4)), Box((1, 0), (1, 3)), Box((1, 3), (1, 1)), Box((2, 0), (2, 4))])


def test_the_work_of_checking_a_tiling_is_bounded():
    """A tensor of many dims, all of them cut, is refused before its corners are counted."""
    cut = [Box((at,) * 40, (1,) * 40) for at in range(2)]
    assert not tiles((2,) * 40, cut)
