"""A manifest and an object from anywhere are read, or refused with one of Shoal's errors, within bounds of memory."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint import tensorfile
from shoal.checkpoint.commit import newest_verified, read_manifest
from shoal.checkpoint.inspect import listing, verify
from shoal.checkpoint.manifest import MAX_STATE_BYTES, seal
from shoal.checkpoint.objects import Places
from shoal.checkpoint.weights import export, import_weights
from shoal.errors import CorruptCheckpoint, ShoalError, UsageError, VerificationFailed
from tests.checkpoint.states import save, saver_for, state_of
from tests.memory_limit import memory_limit
from tests.waiting import HANG_S

PATH = Path("step-00000001/manifest.json")
MEGABYTE = 1 << 20
DIGEST = b'"' + b"ab" * 32 + b'"'


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    save(saver_for(directory), 1)
    return directory


def sealed(body: bytes, **parts: bytes) -> bytes:
    """A manifest with a right hash, in which some values are other JSON."""
    tree = {name: msgspec.Raw(value) for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()}
    del tree["hash"]
    return seal(msgspec.json.encode(tree | {name: msgspec.Raw(value) for name, value in parts.items()}))


@pytest.mark.slow
def test_a_large_manifest_of_nothing_takes_little_memory(run):
    """57 MB of `[]` in any place: as Python's objects they would be 1.7 GB."""
    content = Places(run).manifest(1).read_bytes()
    lists = b"[" + b"[]," * (19 * MEGABYTE) + b"[]]"
    for part in ("state", "layout", "writer", "tensors", "objects", "created", "surprise"):
        hostile = sealed(content, **{part: b'{"a":' + lists + b"}" if part in ("state", "layout", "writer") else lists})
        with memory_limit(400 << 20), pytest.raises(CorruptCheckpoint):
            manifests.decode(hostile, PATH)


def test_a_manifest_of_one_list_takes_little_memory(run):
    """A megabyte of zeros where a shape is expected, and objects beyond number in a tensor."""
    content = Places(run).manifest(1).read_bytes()
    zeros = b"[" + b"0," * (8 * MEGABYTE) + b"0]"
    tensors = {
        "shape": b'[{"name":"a","dtype":"float32","boxes":[],"shape":' + zeros + b"}]",
        "offset": b'[{"name":"a","dtype":"float32","shape":[],"boxes":[{"object":' + DIGEST + b',"key":"0","shape":[],'
        b'"offset":' + zeros + b"}]}]",
        "boxes": b'[{"name":"a","dtype":"float32","shape":[9],"boxes":' + zeros + b"}]",
    }
    for value in tensors.values():
        with memory_limit(400 << 20), pytest.raises(CorruptCheckpoint):
            manifests.decode(sealed(content, tensors=value), PATH)


def test_many_corners_are_refused_before_they_are_counted(run):
    """Few bytes that name many corners: two boxes of 40 dims, or many tensors of 20."""
    content = Places(run).manifest(1).read_bytes()

    def tensor(name: str, dims: int) -> dict:
        box = {"shape": [1] * dims, "object": "ab" * 32, "key": "0"}
        boxes = [box | {"offset": [at] * dims} for at in range(2)]
        return {"name": name, "dtype": "uint8", "shape": [2] * dims, "boxes": boxes}

    for tensors in ([tensor("a", 40)], [tensor(f"a{n}", 20) for n in range(500)]):
        hostile = sealed(content, tensors=json.dumps(tensors).encode(), objects=b"{" + DIGEST + b":8}")
        with memory_limit(400 << 20), pytest.raises(CorruptCheckpoint):
            manifests.decode(hostile, PATH)


NUMBERS = [
    b"9" * 5000,
    b"-" + b"9" * 400,
    b"1e999",
    b"4611686018427387904",
    b"9223372036854775808",
    b"-1",
    b"0.5",
    b"null",
    b"true",
    b'"\\ud800"',
    b'"\\u0000"',
    b'"' + b"x" * 99_999 + b'"',
    b"[" * 9_999,
    b"[]",
    b"{}",
    b"[4611686018427387904]",
    b"[4611686018427387904,4611686018427387904,0]",
    b"NaN",
]


def property_of_a_changed_manifest(run: Path, data: st.DataObject) -> None:
    """A value replaced by an odd one under a right hash: what is read can be verified, listed and exported."""
    path = Places(run).manifest(1)
    content = path.read_bytes()
    body = content.partition(b',"hash":')[0] + b"}"
    where = data.draw(st.sampled_from([at for at in range(len(body)) if body[at : at + 1] in b":,["]))
    end = min(at for at in (body.find(mark, where + 1) for mark in (b",", b"]", b"}")) if at >= 0)
    path.write_bytes(seal(body[: where + 1] + data.draw(st.sampled_from(NUMBERS)) + body[end:]))
    try:
        for use in (lambda: read_manifest(path.parent), lambda: export(run, run / "out"), lambda: listing(run)):
            try:
                use()
            except ShoalError as error:
                str(error).encode()
        verify(run)
        newest_verified(run)
    finally:
        (run / "out").unlink(missing_ok=True)
        path.write_bytes(content)


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_manifest_is_read_or_refused(run, data):
    """No exception of Python's, msgspec's or torch's comes out of any verb."""
    property_of_a_changed_manifest(run, data)


@pytest.mark.stress
@settings(deadline=None, max_examples=10_000, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_changed_manifests_are_read_or_refused(run, data):
    """The same with a hundred times the examples."""
    property_of_a_changed_manifest(run, data)


def object_with(shape: bytes, dtype: bytes = b'"U8"', offsets: bytes = b"[0,8]") -> bytes:
    header = b'{"0":{"dtype":' + dtype + b',"shape":' + shape + b',"data_offsets":' + offsets + b"}}"
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(8)


def property_of_a_changed_object(folder: Path, data: st.DataObject) -> None:
    """An odd value in a header, or changed bytes anywhere: tensors no larger than the file, or `CorruptCheckpoint`."""
    odd = st.sampled_from(NUMBERS)
    shape, dtype, offsets = (data.draw(odd | st.just(usual)) for usual in (b"[8]", b'"F32"', b"[0,8]"))
    content = object_with(shape, dtype, offsets)
    if data.draw(st.booleans()):
        at, gone = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 9))
        content = content[:at] + data.draw(st.binary(max_size=9)) + content[at + gone :]
    path = folder / "object"
    path.unlink(missing_ok=True)  # what was read is mapped: the file must not change under it
    path.write_bytes(content)
    try:
        found = tensorfile.read(path)
    except CorruptCheckpoint as error:
        str(error).encode()
    else:
        assert sum(tensor.nbytes for tensor in found.values()) <= len(content)


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_object_is_read_or_refused(tmp_path, data):
    """Numbers in a header are not believed."""
    property_of_a_changed_object(tmp_path, data)


@pytest.mark.stress
@settings(deadline=None, max_examples=20_000, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_changed_objects_are_read_or_refused(tmp_path, data):
    """The same with many more examples."""
    property_of_a_changed_object(tmp_path, data)


@pytest.mark.parametrize("shape", [b"[" + b"4611686018427387904," * 30_000 + b"0]", b"[4611686018427387904,4,0]"])
def test_shapes_beyond_any_tensor_are_refused_at_once(tmp_path, shape):
    """Their product is not even computed."""
    path = tmp_path / "object"
    path.write_bytes(object_with(shape, offsets=b"[0,0]"))
    with pytest.raises(CorruptCheckpoint, match="object"):
        tensorfile.read(path)


SPECIAL = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL.keys())
@pytest.mark.parametrize("which", ["manifest", "object", "latest"])
def test_what_is_no_regular_file_keeps_nobody_waiting(tmp_path, make, which):
    """In the place of any file of a checkpoint: it is named, and the checkpoint before is used."""
    saver = saver_for(tmp_path)
    save(saver, 1, state_of(1))
    save(saver, 2, state_of(2))
    places = Places(tmp_path)
    one, two = (read_manifest(places.step(step)).objects for step in (1, 2))
    new = places.object(next(digest for digest in two if digest not in one))
    path = {"manifest": places.manifest(2), "object": new, "latest": places.latest}[which]
    path.unlink()
    make(path)
    found, problems = newest_verified(tmp_path)
    assert found is not None
    assert found.step == (2 if which == "latest" else 1)
    assert any(str(path) in problem and "regular file" in problem for problem in problems)
    with pytest.raises(ShoalError):
        import_weights(path, tmp_path / "imported")
    with pytest.raises(VerificationFailed):
        tensorfile.read(path)


def test_a_file_whose_name_is_not_unicode_is_refused_in_words_that_can_be_printed(tmp_path):
    """The safetensors library opens no such file; its name is shown escaped."""
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/w\xff.safetensors"))
    save_file({"a": state_of(1)["model/weight"]}, tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").rename(file)
    with pytest.raises(UsageError, match=r"w\\udcff\.safetensors cannot be read") as caught:
        import_weights(file, tmp_path / "imported")
    str(caught.value).encode()


def test_the_limit_of_the_state_is_met_by_the_writer_first(tmp_path):
    """A state that could not be read again is not saved: the report says what to do."""
    draw = random.Random(0)
    large = {"numbers": [draw.randrange(10**9, 10**10) for _ in range(MAX_STATE_BYTES // 10)]}
    saver = saver_for(tmp_path)
    saver.save(1, state_of(1), large, layout={})
    (report,) = saver.wait(HANG_S)
    assert not report.committed
    assert "save what is large as tensors" in str(report.error)
