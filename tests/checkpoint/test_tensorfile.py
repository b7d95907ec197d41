"""Objects are safetensors files, read within bounds."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from shoal.checkpoint.staging import Staging
from shoal.checkpoint.tensorfile import DTYPES, TensorSpec, read
from shoal.errors import CorruptCheckpoint
from shoal.state import parts_of
from shoal.topology.holding import whole
from tests.checkpoint.states import light, parcels


def every_type():
    """A tensor of each element type, one of no dims, one of no elements, one that is not contiguous."""
    tensors = {dtype.name: torch.arange(7).to(dtype.torch) for dtype in DTYPES}
    tensors["no dims"] = torch.tensor(3.5)
    tensors["no elements"] = torch.empty(2, 0)
    tensors["transposed"] = torch.arange(6.0).view(2, 3).t()
    return tensors


def staged(tensors):
    """The parcel that holds `tensors`, and the bytes of its object."""
    specs = [
        TensorSpec(name, str(tensor.dtype)[6:], tensor.itemsize, tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    (parcel,) = parcels(specs, 1 << 20)
    staging = Staging([parcel], {name: [whole(tuple(tensor.shape))] for name, tensor in tensors.items()})
    staging.fill(parts_of(tensors))
    ((content, _),) = staging.objects()
    return parcel, bytes(content)


def test_every_type_and_shape_survives_in_both_readers(tmp_path):
    """Shoal's reader and the safetensors library find the same tensors, bit by bit."""
    tensors = every_type()
    parcel, content = staged(tensors)
    path = tmp_path / "object"
    path.write_bytes(content)
    ours, theirs = read(path), load(content)
    for key, piece in enumerate(parcel):
        expected = tensors[piece.spec.name].contiguous()
        for found in (ours[str(key)], theirs[str(key)]):
            assert found.dtype == expected.dtype
            assert found.shape == expected.shape
            assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_equal_content_is_equal_bytes_whatever_it_is_called():
    """Names are not in the file, so equal tensors become one object."""
    assert staged({"model/a": torch.ones(5)})[1] == staged({"optimizer/b": torch.ones(5)})[1]


def with_header(entries: object, *, data: bytes = b"\0" * 16, announced: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return (len(text) if announced is None else announced).to_bytes(8, "little") + text + data


HOSTILE = {
    "shorter than a length": b"\0\0\0",
    "header beyond the file": with_header({}, announced=1 << 40),
    "header beyond the limit": (1 << 21).to_bytes(8, "little") + b"{}" + b" " * (1 << 22),
    "not JSON": (8).to_bytes(8, "little") + b"\xff" * 8,
    "nested without end": (1 << 19).to_bytes(8, "little") + b"[" * (1 << 19),
    "unknown field": with_header({"0": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "x": 1}}),
    "unknown type": with_header({"0": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 1]}}),
    "end beyond the file": with_header({"0": {"dtype": "U8", "shape": [17], "data_offsets": [0, 17]}}),
    "begins before the data": with_header({"0": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}}),
    "ends before it begins": with_header({"0": {"dtype": "U8", "shape": [-4], "data_offsets": [8, 4]}}),
    "shape larger than the bytes": with_header({"0": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}),
    "negative dims": with_header({"0": {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]}}),
    "unaligned": with_header({"0": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_file_that_lies_is_refused_with_its_name(tmp_path, content):
    """No number of a header is believed before it is checked against the file."""
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"hostile\.safetensors"):
        read(path)


def test_a_missing_file_is_a_corrupt_checkpoint(tmp_path):
    """The error is Shoal's own, and names the file."""
    with pytest.raises(CorruptCheckpoint, match="absent"):
        read(tmp_path / "absent")


@light
@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_any_byte_of_a_header_may_change_without_a_crash(tmp_path_factory, position, value):
    """A changed byte gives tensors within the file or `CorruptCheckpoint`, never another exception."""
    content = bytearray(staged({"model/a": torch.arange(3.0), "model/b": torch.arange(5)})[1])
    content[position % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        found = read(path)
    except CorruptCheckpoint:
        return
    assert sum(tensor.nbytes for tensor in found.values()) <= 2 * len(content)
