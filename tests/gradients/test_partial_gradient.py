"""What a script asks of a gradient of which this rank has a run of numbers, or none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from shoal.gradients.partial_gradient import PartialGradient
from tests.comm.local import local_group

WHOLE = torch.tensor([[-3.0, 1.0, 2.0], [0.5, -0.25, -1.0]])
ASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda gradient: gradient.max(),
    "smallest": lambda gradient: gradient.min(),
    "largest size": lambda gradient: gradient.abs().max(),
    "norm": lambda gradient: gradient.norm(),
    "norm of the largest": lambda gradient: gradient.norm(float("inf")),
    "sum": lambda gradient: gradient.sum(),
    "mean": lambda gradient: gradient.mean(),
    "not a number": lambda gradient: gradient.isnan().any(),
}


@pytest.mark.parametrize("cut", [0, 2, 6])
@pytest.mark.parametrize("what", ASKED)
def test_every_rank_gets_the_number_of_the_whole_gradient(what: str, cut: int) -> None:
    """Also a rank that has nothing of it, as of a small parameter in a large piece."""
    group, flat = local_group(2), WHOLE.reshape(-1)

    def asked(rank: int) -> Tensor:
        run = (slice(0, cut), slice(cut, 6))[rank]
        gradient = PartialGradient(flat[run].clone(), run.start, WHOLE.shape, group=group[rank], what="the gradient")
        return ASKED[what](gradient)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(asked, range(2)))
    torch.testing.assert_close(torch.stack(found), ASKED[what](WHOLE).expand(2))


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_what_every_rank_has_counts_once_beside_it(order: float) -> None:
    """A tensor of the script's own in the list, and a gradient of which a rank before has the same numbers."""
    group, flat = local_group(4), WHOLE.reshape(-1)

    def asked(rank: int) -> list[Tensor]:
        run = (slice(0, 2), slice(2, 6))[rank % 2]
        gradient = PartialGradient(
            flat[run].clone(), run.start, WHOLE.shape, group=group[rank], what="the gradient", counts=rank < 2
        )
        assert torch.equal(gradient.whole(), WHOLE)
        return list(torch._foreach_norm([gradient, WHOLE.clone()], order))  # pyright: ignore[reportPrivateImportUsage]

    with ThreadPoolExecutor(4) as threads:
        found = [norm for norms in threads.map(asked, range(4)) for norm in norms]
    torch.testing.assert_close(torch.stack(found), torch.linalg.vector_norm(WHOLE, order).expand(8))
