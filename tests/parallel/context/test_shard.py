"""Who holds which tokens."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import LayoutError
from shoal.parallel.context.core import by_rank, check_sequence, in_sequence, positions


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_token_is_held_once_and_causal_work_is_equal(size: int) -> None:
    """The pairs (token, earlier token) are the same number on each rank, up to those inside a chunk's own tokens."""
    tokens = 8 * size
    held = [positions(tokens, size=size, rank=rank) for rank in range(size)]
    assert sorted(torch.cat(held).tolist()) == list(range(tokens))
    assert len({int(places.sum()) for places in held}) == 1
    assert all(torch.equal(places, places.sort().values) for places in held)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_put_together_are_the_whole(size: int) -> None:
    whole = torch.arange(2 * 16 * 3).view(2, 16, 3)
    parts = [whole.index_select(1, positions(16, size=size, rank=rank)) for rank in range(size)]
    assert torch.equal(in_sequence(parts, dim=1), whole)
    assert torch.equal(by_rank(whole, size=size, dim=1), torch.stack(parts))


@pytest.mark.parametrize(("tokens", "nearest"), [(30, "24 or sequence=32"), (4, "8"), (0, "8")])
def test_an_odd_sequence_is_refused_with_the_nearest(tokens: int, nearest: str) -> None:
    with pytest.raises(LayoutError, match=f"sequence={tokens} cannot .* context=4: .* nearest: sequence={nearest}$"):
        check_sequence(tokens, 4)
    check_sequence(tokens, 1)
