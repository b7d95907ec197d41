"""Texts, None, bytes, lists and dataclasses in samples: carried beside the tensors, and given back as they were."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from shoal.data.collate import collate, collate_stacked
from shoal.data.inputs import AsInputs, Collated, pack, unpack, unpacked
from shoal.data.sample import padding_like
from shoal.errors import UserCodeError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Box:
    corners: torch.Tensor
    label: str


@dataclass
class Scene:
    image: torch.Tensor
    boxes: list[Box]
    author: str | None = None


class Row(NamedTuple):
    image: torch.Tensor
    label: int


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
)


@given(VALUES, st.integers(0, 9))
def test_a_value_comes_back_as_it_was(value: Any, padding: int) -> None:
    """Behind any padding."""
    row = torch.cat([pack(value), torch.zeros(padding, dtype=torch.uint8)])
    assert unpack(row, CPU) == value


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (2, 3)])
def test_so_do_tensors_of_every_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    found = unpack(pack([tensor, "beside", tensor]), CPU)
    assert found[1] == "beside"
    for each in (found[0], found[2]):
        assert each.dtype == dtype
        assert each.shape == tensor.shape
        assert torch.equal(each, tensor)


def batch_of(samples: list[Any]) -> Any:
    """What the loop gets of these samples without a collate of its own."""
    source = AsInputs(samples)
    batch = collate([source[i] for i in range(len(samples))], np.arange(len(samples)))
    return unpacked(batch.inputs, CPU)


def test_texts_are_lists_as_default_collate_has_them() -> None:
    samples = [{"path": f"images/{'x' * i}.png", "image": torch.full((2,), float(i)), "id": i} for i in range(3)]
    found, plain = batch_of(samples), default_collate(samples)
    assert found["path"] == plain["path"]
    assert torch.equal(found["image"], plain["image"])
    assert torch.equal(found["id"], plain["id"])


def test_named_tuples_keep_their_names() -> None:
    """As in PyTorch, alone and inside of other samples; one that nobody finds by its name is a tuple."""
    found = batch_of([Row(torch.ones(2) * i, i) for i in range(3)])
    assert isinstance(found, Row)
    assert list(found.label) == [0, 1, 2]  # pyright: ignore[reportArgumentType]
    assert unpack(pack([Row(torch.ones(2), 1)]), CPU)[0].label == 1
    hidden = namedtuple("hidden", "image label")
    assert type(batch_of([hidden(torch.ones(2), i) for i in range(3)])) is tuple


def test_none_bytes_and_dataclasses() -> None:
    """A dataclass of tensors and texts is one of batches of them."""
    found = batch_of([(None, b"raw\0", Box(torch.ones(4) * i, f"label {i}")) for i in range(2)])
    assert found[:2] == ([None, None], [b"raw\0", b"raw\0"])
    assert isinstance(found[2], Box)
    assert found[2].label == ["label 0", "label 1"]
    assert found[2].corners.shape == (2, 4)


def detection(items: list[Scene]) -> dict[str, Any]:
    """As detection models want their batches: images side by side, a list of boxes for each."""
    return {
        "images": torch.stack([item.image for item in items]),
        "boxes": [[box.corners for box in item.boxes] for item in items],
        "scenes": items,
        "size": (8, 8),
        "note": None,
        "longest": torch.tensor(max(len(item.boxes) for item in items)),
    }


def scene(number: int) -> Scene:
    boxes = [Box(torch.full((4,), float(number)), f"{number}/{k}") for k in range(number)]
    return Scene(torch.full((2, 2), float(number)), boxes, None if number else "nobody")


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_what_a_collate_returns_is_given_as_it_is(count: int) -> None:
    """Also lists of another length for each sample, and what belongs to the batch."""
    items = [scene(i) for i in range(count)]
    source = Collated(items, detection)  # type: ignore[arg-type]
    batch = collate_stacked(source.collated(items), np.arange(count))
    found = unpacked(batch.inputs, CPU)
    assert found["images"].shape == (count, 2, 2)
    assert [len(boxes) for boxes in found["boxes"]] == list(range(count))
    assert [box.label for each in found["scenes"] for box in each.boxes] == [b.label for i in items for b in i.boxes]
    assert all(isinstance(each, Scene) for each in found["scenes"])
    assert found["scenes"][0].author == "nobody"
    assert (found["size"], found["note"], int(found["longest"])) == ((8, 8), None, count - 1)


def test_a_padding_sample_is_a_copy_of_the_first() -> None:
    source = Collated([scene(i) for i in range(3)], detection)  # type: ignore[arg-type]
    batch = collate_stacked(source.collated([source.item_at(i) for i in range(3)]), np.arange(3))
    found = unpacked(padding_like(batch, 2).inputs, CPU)
    assert [each.author for each in found["scenes"]] == ["nobody", "nobody"]


def test_an_object_of_another_kind_is_refused_with_what_may_be() -> None:
    with pytest.raises(UserCodeError, match="holds an object of set; it may hold tensors"):
        pack([{1, 2}])
    with pytest.raises(UserCodeError, match="must be a tensor, an array or a number"):
        AsInputs([{1, 2}])[0]  # type: ignore[list-item]


def test_a_class_inside_of_a_function_is_refused() -> None:
    @dataclass
    class Hidden:
        x: int

    with pytest.raises(UserCodeError, match="define it at the top of its module"):
        pack(Hidden(1))
