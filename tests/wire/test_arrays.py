"""What the wire takes as an array, and what it refuses in a sentence."""

from __future__ import annotations

import array
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import UsageError
from shoal.wire import Group, as_array, init


@pytest.fixture(scope="module")
def alone():
    return init({})


def test_arrays_of_others_are_the_same_memory() -> None:
    """torch's by DLPack, bytes and arrays by the buffer protocol: what is written there is seen here."""
    tensor, numbers, raw = torch.zeros(3), array.array("d", [0.0, 0.0]), bytearray(4)
    seen = [as_array(tensor), as_array(numbers), as_array(raw)]
    tensor[1], numbers[1], raw[1] = 5.0, 6.0, 7
    assert [float(each[1]) for each in seen] == [5.0, 6.0, 7.0]


def test_jax_arrays_are_not_copied() -> None:
    jnp = pytest.importorskip("jax.numpy", reason="of JAX arrays")
    given = jnp.arange(1000.0)
    assert as_array(given).__array_interface__["data"][0] == given.unsafe_buffer_pointer()


class OnDevice:
    """As CuPy's arrays present themselves: on a GPU (device type 2), and able to make a copy on the CPU."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **given: Any) -> Any:
        self.asked.append(given["dl_device"])
        return np.arange(4.0).__dlpack__(max_version=(1, 0))


def test_an_array_on_a_device_is_copied_by_its_framework(alone) -> None:
    """DLPack's `dl_device`: the consumer asks for the CPU."""
    given = OnDevice()
    assert np.array_equal(alone.all_reduce(given), np.arange(4.0))
    assert given.asked == [(1, 0)]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda g: g.all_reduce("text"), "is no array"),
        (lambda g: g.all_reduce(np.array([None])), "dtype of fixed size"),
        (lambda g: g.all_reduce(np.ones(2), op="median"), "no reduction 'median'"),
        (lambda g: g.all_reduce(np.ones(2, np.int32), op="avg"), "floating-point"),
        (lambda g: g.all_reduce(np.ones(2), out=np.ones(3)), "give an array of that dtype and shape"),
        (lambda g: g.all_reduce(np.ones(3, np.uint8), out=b"abc"), "cannot be written"),
        (lambda g: g.broadcast(np.ones(2), root=1), "no rank 1"),
        (lambda g: g.send(np.ones(2), to=0), "itself"),
        (lambda g: g.all_reduce(np.ma.array([1.0, 2.0], mask=[0, 1])), "its mask would be lost"),
        (lambda g: g.all_reduce(np.ones(2, ">f4")), "convert the array"),
        (lambda g: g.all_reduce(torch.ones(2, requires_grad=True)), "gives no array: .*detach"),
        (lambda g: g.all_reduce(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)), "gives no array: .*detach"),
        (lambda g: g.all_reduce(torch.ones(2, dtype=torch.bfloat16, device="meta")), "of a dtype of NumPy's"),
        (lambda g: g.all_to_all(np.ones(3)), "one row"),
    ],
)
def test_what_is_refused_is_said(alone, call, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        call(alone)


def test_bfloat16_of_torch_is_the_same_memory(alone) -> None:
    """Also a scalar, and with strides; without ml_dtypes it is refused."""
    pytest.importorskip("ml_dtypes", reason="bfloat16 of NumPy is that of ml_dtypes, which JAX brings along")
    numbers = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    for given in (numbers, numbers[:, ::2], numbers.t(), numbers[1, 1]):
        assert (as_array(given).astype(np.float32) == given.float().numpy()).all()
    out = torch.zeros(3, 4, dtype=torch.bfloat16)
    alone.all_reduce(numbers, out=out)
    assert torch.equal(out, numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ml_dtypes", None)
        with pytest.raises(UsageError, match="of a dtype of NumPy's"):
            as_array(numbers)


def test_a_tag_is_a_number_of_63_bits() -> None:
    pair = Group(SimpleNamespace(rank=0, size=2), ("a", "b"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"the tag -1 is none of 0 to 2\^63 - 1"):
        pair.send(np.ones(1), to=1, tag=-1)


def test_out_may_have_strides(alone) -> None:
    whole = np.zeros((4, 6))
    assert alone.all_reduce(np.ones((4, 3)), out=whole[:, ::2]) is not None
    assert whole.sum() == 12
