"""How the column layers of a module share the way in."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.parallel.tensor.layers import Entrance


class Counted:
    """A crossing that counts, and gives a new tensor each time."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.times += 1
        return x * 2


def test_layers_that_get_the_same_tensor_cross_once() -> None:
    """Three layers, twice: once for each input, though the second is the same tensor again."""
    crossing, x = Counted(), torch.ones(2)
    entrance = Entrance(crossing, 3)
    first = [entrance(x) for _ in range(3)]
    assert crossing.times == 1
    assert first[0] is first[1] is first[2]
    entrance(x)
    assert crossing.times == 2


def test_layers_that_get_different_tensors_cross_each() -> None:
    """One after the other, or in turn; nobody gets what came of another tensor."""
    crossing, a, b = Counted(), torch.ones(2), torch.full((2,), 5.0)
    entrance = Entrance(crossing, 2)
    for x in (a, b, a, a, b, b):
        assert torch.equal(entrance(x), x * 2)


def test_what_was_not_recorded_is_not_used_where_gradients_are_wanted() -> None:
    entrance, x = Entrance(Counted(), 2), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        entrance(x)
    assert entrance(x).requires_grad


def test_nothing_is_kept_once_all_layers_had_it() -> None:
    entrance, x = Entrance(Counted(), 2), torch.ones(2)
    entrance(x)
    entrance(x)
    assert entrance._kept is None
