"""A rank that has no part of what others have on their GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from shoal.comm.collective import Alone
from shoal.gradients.build import UnsummedGradients
from shoal.optim.parts import Parts, PartSums

DEVICE = torch.device("meta")
"""An operator refuses tensors of it beside those of the CPU, as one refuses those of a GPU."""


class Two(Alone):
    """A group of two ranks, on the device, whose sums are this one's part."""

    size, device = 2, DEVICE  # type: ignore[assignment]


def test_a_rank_without_a_part_takes_part_in_a_sum() -> None:
    """Its piece may be padding alone: what it has added up is nothing, and lies nowhere."""
    sums: Any = object.__new__(PartSums)
    sums._group, sums._device, sums._rows, sums._counted, sums._length = Two(), DEVICE, {}, {}, 3
    assert sums([], torch.zeros(0, 2, dtype=torch.float64)).shape == (0, 2)
    parameter = Parameter(torch.ones(4, device=DEVICE))
    sums._rows, sums._counted = {id(parameter): 1}, {id(parameter): True}
    assert sums([parameter], torch.zeros(1, 2, device=DEVICE)).device == DEVICE


def test_a_rank_without_a_part_knows_where_the_others_are() -> None:
    """As that of a pipeline's frozen stage, and for the part that one optimizer of several steps."""
    parts = Parts([], Two(), Alone())
    assert parts.device == DEVICE
    assert parts.of(torch.optim.SGD([Parameter(torch.ones(1))], lr=0.1)).device == DEVICE
    assert Parts([], Alone(), Alone()).device.type == "cpu"
    gradients = UnsummedGradients([], replica=Two())
    assert gradients._norm_of([]).device == DEVICE
