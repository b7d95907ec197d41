"""Frames hold what was written, and anything else is refused before it takes memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.federated.transport import messages

VECTORS = {
    "a": torch.arange(5, dtype=torch.int8),
    "b": torch.tensor([1.5, -2.5]),
    "c": torch.tensor([], dtype=torch.float64),
    "d": torch.tensor([7, 8], dtype=torch.uint32),
}
PARTS = [messages.part_of(name, vector) for name, vector in VECTORS.items()]


def written(path: Path) -> Path:
    header = messages.UpdateHeader(parts=tuple(PARTS), samples=3, steps=2, metrics={"loss/train": 0.5})
    messages.write_frame(path, header, list(VECTORS.values()))
    return path


def test_a_frame_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Whatever lies before a vector and however it is aligned."""
    read = messages.read_frame(written(tmp_path / "f"), messages.UpdateHeader, lambda _: PARTS)
    assert read.header.samples == 3
    for name, vector in VECTORS.items():
        assert read.vectors[name].dtype == vector.dtype
        assert read.vectors[name].tolist() == vector.tolist()


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_frame_is_refused_or_says_the_same_shape(data: st.DataObject, tmp_path_factory) -> None:
    """Bytes changed, cut off or added: `BadFrame`, or vectors of the lengths that are expected; never another error."""
    path = written(tmp_path_factory.mktemp("frames") / "f")
    content = bytearray(path.read_bytes())
    match data.draw(st.sampled_from(["change", "cut", "add", "replace"])):
        case "change":
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "add":
            content += data.draw(st.binary(min_size=1, max_size=9))
        case _:
            content = bytearray(data.draw(st.binary(max_size=200)))
    path.write_bytes(content)
    try:
        read = messages.read_frame(path, messages.UpdateHeader, lambda _: PARTS)
    except messages.BadFrame:
        return
    assert [len(vector) for vector in read.vectors.values()] == [len(vector) for vector in VECTORS.values()]


def test_a_header_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    """A length of terabytes, a header of megabytes, parts that nobody expects."""
    path = tmp_path / "f"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"x")
    with pytest.raises(messages.BadFrame, match="says that its header has"):
        messages.read_frame(path, messages.UpdateHeader)
    huge = messages.UpdateHeader(parts=(messages.Part("a", "float32", 1 << 40),), samples=1, steps=1)
    path.write_bytes(messages.frame_head(huge))
    with pytest.raises(messages.BadFrame, match="is expected"):
        messages.read_frame(path, messages.UpdateHeader, lambda _: PARTS)
    with pytest.raises(messages.BadFrame, match="does not have the length"):
        messages.read_frame(path, messages.UpdateHeader)


def test_a_figure_that_would_spoil_the_mean_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "update.frame"
    for value, known in ((-1e30, True), (1.7e308, False), (-1.1e30, False)):
        messages.write_frame(path, messages.UpdateHeader(samples=1, steps=1, metrics={"x/train": value}), [])
        if known:
            assert messages.read_frame(path, messages.UpdateHeader).header.metrics == {"x/train": value}
            continue
        with pytest.raises(messages.BadFrame, match=r"\.metrics"):
            messages.read_frame(path, messages.UpdateHeader)
