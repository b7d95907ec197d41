"""A model built without storage has the first values of an ordinary build, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.models.deferred_build import DeferredBuild, DeferredNumbers

WIDTH = 160  # 25,600 numbers a matrix, of which 16,384 are deferred


def deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredNumbers | None]:
    """The model, and its values."""
    mode = DeferredBuild()
    with mode.building():
        model = build()
    return model, mode.finished(model)


class _Drawn(nn.Module):
    """What `nn.init` has, some of which draws until all numbers fit."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal, self.truncated = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.narrow = nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(self.narrow.weight, mean=1.5, std=1.0, a=2.0, b=3.0)
        self.conv, self.recurrent = nn.Conv2d(32, 64, 5), nn.LSTM(64, 128)
        self.attention = nn.MultiheadAttention(128, 4)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.apart = nn.Parameter(
            torch.empty(WIDTH, WIDTH).normal_(generator=torch.Generator().manual_seed(3))
        )  # fmt: skip


class _Made(nn.Module):
    """Parameters made of each other, in place and not, tied, and of another type; a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 200), nn.Linear(200, WIDTH, bias=False)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight.t())
            self.second.weight[:10].mul_(2)
        self.first.weight.data = self.first.weight.data + self.second.weight.mean()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.half = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.embedding, self.head = nn.Embedding(400, 64, padding_idx=3), nn.Linear(64, 400, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(256, 256)))
        if float(self.second.weight.detach().abs().max()) > 1.0:  # looks at numbers
            self.never = nn.Linear(WIDTH, WIDTH)


class _DrawnInPart(nn.Module):
    """Draws into tensors that do not lie in one piece, from which a kernel takes other numbers of its generator."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        draws = list(_DRAWS.values())
        self.drawn = nn.ParameterList()
        for view in _VIEWS.values():
            for draw in draws:
                matrix = torch.zeros(WIDTH, WIDTH, dtype=kind)
                draw(view(matrix))
                self.drawn.append(nn.Parameter(matrix))
                self.drawn.append(nn.Parameter(torch.randn(3)))  # has other numbers where a draw left others
        self.after = nn.Linear(WIDTH, WIDTH)


_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, : WIDTH // 2],
    "column, which has a place": lambda x: x[5:, 3],
    "transposed": lambda x: x.t(),
    "every second row": lambda x: x[1::2],
    "channels last": lambda x: x.view(10, 16, 16, 10).permute(0, 3, 1, 2),
    "fewer than 16": lambda x: x[2:6, 2:5],
    "none": lambda x: x[:0],
}
_DRAWS: dict[str, Callable[[Tensor], object]] = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "log_normal_": lambda x: x.log_normal_(),
    "exponential_": lambda x: x.exponential_(),
    "random_": lambda x: x.random_(0, 100),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of chances": lambda x: x.bernoulli_(torch.full_like(x, 0.3)),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.5),
    "orthogonal_": lambda x: nn.init.orthogonal_(x) if x.dim() == 2 and x.numel() and x.dtype.itemsize > 2 else x,
    "randn into it": lambda x: torch.randn(x.shape, out=x) if x.numel() > 16 else x,
    "randn_like": lambda x: x.copy_(torch.randn_like(x)),
}


class _DrawnIntoFloats(_DrawnInPart):
    def __init__(self) -> None:
        super().__init__(torch.float32)


class _DrawnIntoHalves(_DrawnInPart):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16)


@pytest.mark.parametrize("kind", [_Drawn, _Made, _DrawnIntoFloats, _DrawnIntoHalves])
def test_first_values_are_those_of_an_ordinary_build(kind: type[nn.Module]) -> None:
    """Parameter by parameter, in any order; the generator ends where it would."""
    torch.manual_seed(7)
    whole, after = kind(), torch.get_rng_state()
    torch.manual_seed(7)
    model, values = deferred(kind)
    assert torch.equal(after, torch.get_rng_state())
    assert values is not None
    pairs = list(zip(whole.named_parameters(), model.named_parameters(), strict=True))
    assert sum(p.is_meta for _, (_, p) in pairs) >= 5
    for (name, wanted), (own, found) in reversed(pairs):
        numbers = values.numbers(own) if found.is_meta else found
        assert (name, numbers.dtype) == (own, wanted.dtype)
        assert torch.equal(numbers, wanted), name
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), model.buffers(), strict=True))
    assert torch.equal(after, torch.get_rng_state()), "making values left the generator elsewhere"


def test_code_that_asks_for_memory_is_not_deferred() -> None:
    """Such a model has to be built whole."""

    def build() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        return layer if layer.weight.data_ptr() else nn.Linear(1, 1)

    with pytest.raises(UserCodeError, match="asks where a parameter lies"):
        deferred(build)
    with pytest.raises(Exception, match=r"numpy|meta"):
        deferred(lambda: nn.Linear(int(nn.Linear(WIDTH, WIDTH).weight.detach().numpy().size), 1))


def test_small_models_have_all_their_storage() -> None:
    """There is nothing to save."""
    model, values = deferred(lambda: nn.Linear(4, 4))
    assert values is None
    assert not model.weight.is_meta
