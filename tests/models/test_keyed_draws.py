"""What a module draws: the same numbers for a sample in any batch, by the law that PyTorch's function has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.codec.kernels import load_kernels
from shoal.models.draw_watch import draws_nothing
from shoal.models.keyed_draws import KeyedDraws
from tests.codec.test_kernels import kernels_built

NUMBERS = 4096
"""Of each sample."""
FAR = 0.1
"""The mean of 4,096 numbers is nearer than this many deviations to that of their law, 6 of the mean's own."""


class Draws(nn.Module):
    """Returns what `draw` makes of a tensor `[samples, NUMBERS]`."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


LAWS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], float, float]] = {
    "random_": (lambda x: x.random_(10), lambda x: x, 4.5, 2.9),
    "random_ between": (lambda x: x.random_(5, 15), lambda x: x, 9.5, 2.9),
    "random_ without bounds": (lambda x: x.random_(), lambda x: x / 2**24, 0.5, 0.29),
    "random_ of bytes": (lambda x: x.to(torch.uint8).random_(), lambda x: x.float(), 127.5, 74.0),
    "randint_like": (lambda x: torch.randint_like(x, 2, 12), lambda x: x, 6.5, 2.9),
    "normal": (lambda x: torch.normal(x + 3.0, 2.0), lambda x: x, 3.0, 2.0),
    "normal of a size": (lambda x: torch.normal(3.0, 2.0, x.shape), lambda x: x, 3.0, 2.0),
    "cauchy_": (lambda x: x.cauchy_(2.0, 3.0), lambda x: ((x - 2) / 3).atan(), 0.0, 0.91),
    "log_normal_": (lambda x: x.log_normal_(1.0, 0.5), lambda x: x.log(), 1.0, 0.5),
    "geometric_": (lambda x: x.geometric_(0.25), lambda x: x, 4.0, 3.5),
    "multinomial": (lambda x: torch.multinomial(x[:, :4] + torch.arange(4), NUMBERS, True), lambda x: x, 7 / 3, 0.75),
    "randn of complex numbers": (lambda x: torch.randn(x.shape, dtype=torch.complex64), lambda x: x.real, 0.0, 0.71),
    "its imaginary part": (lambda x: torch.randn(x.shape, dtype=torch.complex64), lambda x: x.imag, 0.0, 0.71),
    "normal_ of complex numbers": (lambda x: (x + 0j).normal_(1.0, 2.0), lambda x: x.imag, 1.0, 1.41),
    "rand of complex numbers": (lambda x: torch.rand_like(x + 0j), lambda x: x.imag, 0.5, 0.29),
}
"""The draw, a function of it, and that function's mean and deviation."""


def drawn(draw: Callable[[Tensor], Tensor], samples: list[int]) -> Tensor:
    """What a module draws in step 1 for these samples; PyTorch's generator stands elsewhere in each call."""
    torch.manual_seed(len(samples))
    model = Draws(draw)
    mode = KeyedDraws(model, seed=3)
    mode.begin(1, lambda: torch.tensor(samples) * 7919, tokens=5)
    with mode:
        found = model(torch.zeros(len(samples), NUMBERS))
    assert mode.unkeyed == set()
    return found


@pytest.mark.parametrize("name", LAWS)
def test_a_sample_draws_the_same_in_any_batch_by_its_law(name: str) -> None:
    draw, statistic, mean, deviation = LAWS[name]
    whole, part = drawn(draw, [0, 1, 2, 3]), drawn(draw, [2, 3])
    assert torch.equal(whole[2:], part)
    assert not torch.equal(whole[0], whole[1])
    for sample in statistic(whole).double():
        assert abs(float(sample.mean()) - mean) < FAR * deviation
        assert abs(float(sample.std()) - deviation) < 2 * FAR * deviation


@pytest.mark.parametrize("inner", [(3, 5, 5), (5, 5), (2, 3, 5, 5)], ids=str)
def test_what_a_longer_batch_is_padded_with_changes_no_draw(inner: tuple[int, ...]) -> None:
    """Of attention, whose last two dims are both the length that a batch is padded to."""
    padded = (*inner[:-2], 7, 7)
    short, long = (drawn(lambda x, to=to: torch.rand(len(x), *to), [4, 5]) for to in (inner, padded))
    assert torch.equal(long[..., :5, :5], short)
    assert len(long.unique()) == long.numel()


@kernels_built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4, 3, 9, 9), (64, 5), (7, 4, 5), (4, 70), (4,), (3, 5)], ids=str)
def test_masks_of_the_loop_in_c_are_those_of_the_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Wherever samples stand, and where there are none, whatever type new tensors have."""
    kernels, found = load_kernels(), []
    before = torch.get_default_dtype()
    assert kernels is not None
    for loops in (None, kernels):
        model = Draws(lambda x: F.dropout(x, 0.3))
        mode = KeyedDraws(model, seed=3)
        mode.loops = loops
        mode.begin(1, lambda: torch.arange(4) * 7919 - 2**62, tokens=5)
        torch.set_default_dtype(torch.float64)
        with mode:
            found.append(model(torch.ones(shape, dtype=dtype)))
        torch.set_default_dtype(before)
    assert torch.equal(*found)
    assert 0 < float((found[0] == 0).double().mean()) < 1 or found[0].numel() < 20


OF_SAMPLES: list[Callable[[Tensor], Tensor]] = [
    torch.randn_like,
    torch.rand_like,
    lambda x: torch.randn_like(x[:, 0]),
    lambda x: torch.rand(0, *x.shape[1:]),
    lambda x: torch.rand_like(x[:, :0]),
    lambda x: torch.randn(3, len(x)),
    lambda x: torch.randn_like(x, dtype=torch.complex64),
    lambda x: torch.randint_like(x, 9),
    lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    lambda x: torch.empty_like(x).exponential_(),
    lambda x: torch.normal(x, 2.0),
    torch.func.grad(lambda x: (x * torch.randn_like(x)).sum()),
    torch.func.grad(lambda x: F.dropout(x, 0.3).sum()),
]


@kernels_built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("law", OF_SAMPLES)
def test_numbers_of_the_loops_in_c_are_those_of_torch(law: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    found = []
    for loops in (None, load_kernels()):
        model = Draws(law)
        mode = KeyedDraws(model, seed=3)
        mode.loops = loops
        mode.begin(1, lambda: torch.arange(4) * 7919 - 2**62, tokens=5)
        with mode:
            found.append(model(torch.ones(4, 33, 17, dtype=dtype)))
    assert torch.equal(*found)
    assert found[0].numel() == 0 or bool((found[0] != found[0].flatten()[0]).any())


@kernels_built
def test_fake_tensors_are_drawn_without_memory() -> None:
    """As by a count of operations, amid a forward; what follows draws as if it had been real."""
    found = []
    for fake in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        model = Draws(lambda x, fake=fake: _drawn_under(fake, x))
        mode = KeyedDraws(model, seed=3)
        mode.loops = load_kernels()
        mode.begin(1, lambda: torch.arange(4) * 7919, tokens=5)
        with mode:
            found.append(model(torch.ones(4, 33)))
    assert torch.equal(*found)


def _drawn_under(fake: AbstractContextManager[Any], x: Tensor) -> Tensor:
    first = torch.rand_like(x)  # asks for the keys of the samples
    with fake:
        drawn = F.dropout(torch.randn_like(x))
    assert drawn.shape == x.shape
    return first + torch.rand_like(x) + F.dropout(x)


def in_place(drop: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What is left in the tensor that `drop` is given."""

    def dropped(x: Tensor) -> Tensor:
        drop(x)
        return x

    return dropped


DROPOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.dropout(x, 0.25, True),
    lambda x: torch.dropout(x, p=0.25, train=True),
    lambda x: torch.native_dropout(x, 0.25, True)[0],
    lambda x: torch.feature_dropout(x, 0.25, True),
    lambda x: F.dropout(x, torch.tensor(0.25)),  # type: ignore[arg-type]
    in_place(lambda x: torch.dropout_(x, 0.25, True)),
    in_place(lambda x: torch.feature_dropout_(x, 0.25, True)),
    in_place(lambda x: F.dropout(x, 0.25, inplace=True)),
]


@pytest.mark.parametrize("draw", DROPOUTS)
def test_dropout_is_the_same_in_all_its_forms(draw: Callable[[Tensor], Tensor]) -> None:
    expected = drawn(lambda x: F.dropout(x + 1, 0.25), [0, 1, 2])
    assert torch.equal(drawn(lambda x: draw(x + 1), [0, 1, 2]), expected)


@pytest.mark.parametrize("drop", [F.dropout1d, F.dropout3d])
def test_channels_of_a_tensor_without_samples_are_dropped_whole(drop: Callable[..., Tensor]) -> None:
    """PyTorch takes two dims for [channels, length], four for [channels, depth, height, width]."""
    shape = (64, 8) if drop is F.dropout1d else (64, 2, 2, 2)
    kept = drawn(lambda x: drop(torch.ones(shape), 0.5), [0, 1]).flatten(1)
    assert set(kept.sum(1).tolist()) == {0.0, 16.0}


@kernels_built
def test_a_probability_that_a_loop_changes_in_place_is_read_anew() -> None:
    kernels, p, found = load_kernels(), torch.tensor(0.25), []
    assert kernels is not None
    model = Draws(lambda x: F.dropout(x, p))  # type: ignore[arg-type]
    mode = KeyedDraws(model, seed=3)
    mode.loops = kernels
    for value in (0.25, 0.5):
        p.fill_(value)
        mode.begin(1, lambda: torch.arange(4), tokens=0)
        with mode:
            found.append(float(model(torch.ones(4, 64)).max()))
    assert found == [float(torch.tensor(1.0) / 0.75), 2.0]


def test_all_may_be_dropped_between_layers_and_in_attention() -> None:
    """By a probability of 1, which has no factor for what stays."""
    layers = nn.LSTM(8, 4, 2, dropout=1.0, batch_first=True)
    x = torch.ones(2, 3, 8)
    torch.testing.assert_close(drawn(lambda _: layers(x)[0], [0, 1]), layers(x)[0])
    assert not drawn(lambda _: F.scaled_dot_product_attention(x, x, x, dropout_p=1.0), [0, 1]).any()


@pytest.mark.parametrize("samples", [[2], [2, 3], [1, 2, 3, 0], [0, 2, 1]])
def test_rows_of_tokens_are_those_of_their_sample(samples: list[int]) -> None:
    """Also where there are as many columns as samples, as in the scores of a router: tokens x experts."""
    rows = drawn(lambda x: torch.rand(len(x) * 5, 4), [0, 1, 2, 3]).view(4, 5, 4)
    part = drawn(lambda x: torch.rand(len(x) * 5, 4), samples).view(-1, 5, 4)
    assert torch.equal(rows[samples], part)
    sequences = drawn(lambda x: torch.rand(5, len(x), 4), [0, 1, 2, 3])
    assert torch.equal(sequences[:, samples], drawn(lambda x: torch.rand(5, len(x), 4), samples))


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: torch.multinomial(torch.ones(5), 2), "multinomial"),
        (lambda x: torch.randperm(len(x)), "randperm"),
        (lambda x: torch.distributions.Gamma(x + 1, 1.0).sample(), "_standard_gamma"),
        (lambda x: torch.poisson(x + 1), "poisson"),
        (lambda x: torch.nn.functional.rrelu(x - 1, training=True), "rrelu"),
        (lambda x: torch.rand(len(x), generator=torch.Generator().manual_seed(0)), "rand(generator=...)"),
    ],
)
def test_what_cannot_be_keyed_is_named(draw: Callable[[Tensor], Tensor], name: str) -> None:
    model = Draws(draw)
    mode = KeyedDraws(model, seed=3)
    mode.begin(1, lambda: torch.tensor([0, 1]), tokens=0)
    with mode:
        model(torch.zeros(2, 8))
    assert mode.unkeyed == {name}


def test_a_query_that_sees_nothing_has_no_gradient_under_dropout() -> None:
    """By a float mask, as `nn.MultiheadAttention` makes one of padding: zeros, as PyTorch's own without dropout."""
    mask = torch.zeros(2, 1, 3, 3)
    mask[0, 0, 0] = -torch.inf
    found = []
    for p in (0.0, 0.1):
        query = torch.ones(2, 2, 3, 4, requires_grad=True)
        model = Draws(lambda x, p=p: F.scaled_dot_product_attention(x, x, x, mask, p))
        mode = KeyedDraws(model, seed=3)
        mode.begin(1, lambda: torch.tensor([0, 1]), tokens=3)
        with mode:
            out = model(query)
        (gradient,) = torch.autograd.grad(out[0, :, 0].square().sum() + out[1].sum(), query)
        assert not out[0, :, 0].any()
        found.append(gradient)
    assert all(gradient.isfinite().all() and not gradient[0].any() for gradient in found)


def hooked(module: nn.Module) -> nn.Module:
    """What it gives becomes noise."""

    def noise(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return torch.rand_like(output)

    module.register_forward_hook(noise)
    return module


def replaced(module: nn.Module) -> nn.Module:
    """One module computes otherwise than its class."""
    module.forward = torch.rand_like
    return module


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.LayerNorm(2))), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), False),
        (nn.Sequential(nn.Linear(2, 2), Draws(torch.rand_like)), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), False),
        (nn.Sequential(hooked(nn.Linear(2, 2))), False),
        (nn.Sequential(replaced(nn.Linear(2, 2))), False),
    ],
    ids=["layers", "dropout", "a user's", "parametrized", "a hook", "another forward"],
)
def test_what_draws_nothing_is_known_by_its_classes(model: nn.Module, said: bool) -> None:
    """A subclass is another class."""
    assert draws_nothing(model) is said


FOR_PARAMETERS: list[Callable[[Tensor], Tensor]] = [
    torch.randn_like,
    torch.rand_like,
    lambda weight: torch.normal(weight, 1.0),
    lambda weight: torch.normal(0.0, weight),
    lambda weight: torch.normal(mean=weight, std=weight),
    lambda weight: torch.normal(weight, weight.exp()),
]


@pytest.mark.parametrize("draw", FOR_PARAMETERS)
def test_what_is_drawn_for_a_parameter_knows_no_samples(draw: Callable[[Tensor], Tensor]) -> None:
    """The noise on a weight `[3, 4]`, as of a Bayesian layer, is the same in a batch of three samples, four or five."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return draw(self.weight)

    model = Noisy()
    mode = KeyedDraws(model, seed=3)
    found = []
    for samples in (3, 4, 5):
        mode.begin(1, partial(torch.arange, samples), tokens=5)
        with mode:
            found.append(model(torch.zeros(samples, 4)).detach())
    assert all(torch.equal(each, found[0]) for each in found)


def test_what_is_drawn_for_samples_knows_them_whatever_its_deviation_is() -> None:
    """As of an encoder whose means are of samples, and whose deviation is learned."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deviation = nn.Parameter(torch.ones(4))

        def forward(self, means: Tensor) -> Tensor:
            return torch.normal(means, self.deviation)

    model = Encoder()
    mode, found = KeyedDraws(model, seed=3), []
    for samples in (3, 5):
        mode.begin(1, partial(torch.arange, samples), tokens=5)
        with mode:
            found.append(model(torch.zeros(samples, 4)).detach())
    assert torch.equal(found[1][:3], found[0])
    assert len(found[1].unique(dim=0)) == 5


def test_several_of_a_row_without_replacement_are_those_of_its_rates() -> None:
    """The same for a row in any batch; none twice, none that has no rate, and the first by its rate."""
    rates = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0]).expand(400, 5)
    whole = drawn(lambda x: torch.multinomial(rates[: len(x) * 100], 3), [0, 1, 2, 3])
    part = drawn(lambda x: torch.multinomial(rates[: len(x) * 100], 3), [1, 3]).view(2, 100, 3)
    assert torch.equal(whole.view(4, 100, 3)[[1, 3]], part)
    assert all(sorted(row) == [1, 2, 3] for row in whole.tolist())
    shares = whole[:, 0].bincount(minlength=4) / 400
    assert (shares - rates[0, :4] / 8).abs().max() < FAR


def test_a_permutation_is_the_same_in_any_batch() -> None:
    orders = [drawn(lambda x: torch.randperm(9), samples) for samples in ([0, 1, 2], [4])]
    assert torch.equal(*orders)
    assert sorted(orders[0].tolist()) == list(range(9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_uniform_numbers_of_half_types_are_not_rounded_to_1(dtype: torch.dtype) -> None:
    for draw in (torch.rand_like, Tensor.uniform_):
        assert float(drawn(lambda x, draw=draw: draw(x.to(dtype)), list(range(8))).max()) < 1


def own_numbers(x: Tensor) -> Tensor:
    """Of a generator that is handed over in its place, not by its name."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.poisson(x + 9.0, generator) for _ in range(2)])


def test_a_generator_by_hand_gives_each_number_once() -> None:
    assert torch.equal(drawn(own_numbers, [1, 2]), own_numbers(torch.zeros(2, NUMBERS)))


def mapped(draw: Callable[[Tensor], Tensor], randomness: str) -> tuple[Tensor, set[str]]:
    """What a module draws in `torch.vmap` for each of four samples, and the draws that are named."""
    model = Draws(torch.vmap(draw, randomness=randomness))
    mode = KeyedDraws(model, seed=3)
    mode.begin(1, lambda: torch.arange(4), tokens=0)
    with mode:
        return model(torch.ones(4, 64)), mode.unkeyed


@pytest.mark.parametrize(
    "draw",
    [torch.randn_like, nn.functional.dropout, lambda x: x.clone().normal_(), lambda x: torch.multinomial(x, 8)],
    ids=["randn_like", "dropout", "normal_", "multinomial"],
)
def test_vmap_draws_as_it_is_told(draw: Callable[[Tensor], Tensor]) -> None:
    """The samples that it maps cannot be seen from within: what is drawn there is named as what is not keyed."""
    different, named = mapped(draw, "different")
    assert len(different.unique(dim=0)) == 4
    assert [name.endswith(" under vmap") for name in named] == [True]
    with pytest.raises(RuntimeError, match="randomness"):
        mapped(draw, "error")


def test_vmap_of_what_draws_nothing_names_nothing() -> None:
    assert mapped(partial(nn.functional.dropout, training=False), "error")[1] == set()


COINS: list[tuple[Callable[[Tensor], Tensor], bool]] = [
    (lambda x: torch.rand(1), True),
    (lambda x: torch.randn(size=(1,), dtype=torch.float32), True),
    (
        lambda x: torch.randint(
            0,
            x.shape[1],
            (1,),
        ),
        True,
    ),
    (lambda x: torch.rand([4, 3]), True),
    (lambda x: torch.rand(len(x)), False),
    (lambda x: torch.randint(0, 10, (x.shape[0],)), False),
    (lambda x: torch.randn(x.shape[0], 3), False),
]


@pytest.mark.parametrize(("draw", "shared"), COINS)
def test_a_size_in_figures_is_of_no_sample(draw: Callable[[Tensor], Tensor], shared: bool) -> None:
    """A rank with one sample flips the coin that a rank with three does; a number for each sample stays its own."""
    alone, beside, three = (drawn(draw, samples)[:1] for samples in ([4], [7], [4, 7, 9]))
    assert torch.equal(alone, three)
    assert torch.equal(alone, beside) is shared
