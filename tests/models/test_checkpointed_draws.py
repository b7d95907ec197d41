"""`torch.utils.checkpoint` under keyed draws: what is repeated draws what it drew before, and gradients are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.models.draw_watch import key_checkpoints
from shoal.models.keyed_draws import KeyedDraws


class Net(nn.Module):
    """Two layers, each in a function that drops and adds noise, one of them called twice."""

    def __init__(self, *, repeats: bool, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.repeats, self.reentrant = repeats, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[0]]:

            def part(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return F.dropout(torch.tanh(layer(x)), 0.4) + 0.1 * torch.randn_like(x)

            x = checkpoint(part, x, use_reentrant=self.reentrant) if self.repeats else part(x)
        return x


def gradients(*, repeats: bool, reentrant: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Net(repeats=repeats, reentrant=reentrant), torch.randn(5, 8, requires_grad=True)
    key_checkpoints()
    mode = KeyedDraws(model, seed=1)
    mode.begin(1, lambda: torch.arange(5) * 7919, tokens=8)
    torch.manual_seed(int(repeats))
    with mode:
        loss = model(x).square().mean()
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_those_of_a_forward_that_is_not_repeated(reentrant: bool) -> None:
    found, wanted = gradients(repeats=True, reentrant=reentrant), gradients(repeats=False)
    assert len(found) == 5
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
