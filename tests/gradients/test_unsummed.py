"""Gradients of a rank that has nobody to sum with: those of the bucketed form, without its buckets."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shoal.codec.kernels import Kernels, load_kernels
from shoal.comm.collective import Alone
from shoal.errors import UserCodeError
from shoal.gradients.build import Summing, UnsummedGradients, build_gradients
from shoal.gradients.config import GradientsConfig
from shoal.gradients.gradients import SPLIT, Gradients, VisibleGradients, norm_of_owned, scale_all
from shoal.gradients.replicated import ReplicatedGradients
from shoal.state import Trained, owned_whole
from shoal.topology.holding import held
from shoal.topology.layout import Layout
from tests.gradients.training import Net

kernels_built = pytest.mark.skipif(load_kernels() is None, reason="Shoal was installed without a C compiler")
NOISE = 1e-12
"""Relative, float64: sums in another order."""


def trained(model: nn.Module) -> list[Trained]:
    return [Trained(held(Layout(), 0, name, tuple(p.shape)), p) for name, p in model.named_parameters()]


def bucketed(model: nn.Module) -> Gradients:
    """The naive form: every gradient goes through a bucket."""
    return ReplicatedGradients(
        GradientsConfig(), trained(model), ranks=lambda holding: holding.sums, groups=lambda ranks: Alone(),
        replica=Alone(),
    )  # fmt: skip


def unsummed(model: nn.Module) -> Gradients:
    return build_gradients(
        GradientsConfig(), trained(model), zero=None, groups=lambda ranks: Alone(), replica=Alone(), model=model
    )


def agreed(gradients: Gradients, model: nn.Module, *, wiping: bool = False) -> tuple[float, float, dict[str, Tensor]]:
    """The norm, that of the first microbatch, and the gradients of three microbatches, scaled by 0.5."""
    batches = torch.randint(13, (3, 4, 4), generator=torch.Generator().manual_seed(0))
    gradients.own.wanted = True
    gradients.start()
    for index, batch in enumerate(batches):
        if wiping:
            assert all(parameter.grad is None for parameter in model.parameters())
            model.zero_grad(set_to_none=False)
        with gradients.backward(last=index == 2):
            model(batch).square().sum().backward()
    norm, first = float(gradients.reduce()), float(gradients.own.squares({}, torch.device("cpu"))[0])
    gradients.scale(0.5)
    gradients.gather()
    return norm, first, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def measured_by(make: Callable[[nn.Module], Gradients]) -> tuple[nn.Module, VisibleGradients, float]:
    """A float32 model, its gradients, and their norm."""
    torch.manual_seed(0)
    model = Net()
    gradients = make(model)
    assert isinstance(gradients, VisibleGradients)
    gradients.start()
    with gradients.backward(last=True):
        model(torch.zeros(2, 4, dtype=torch.int64)).square().sum().backward()
    return model, gradients, float(gradients.reduce())


def found_in(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@kernels_built
@pytest.mark.parametrize("share", [1e-9, 0.5, 2.0])
@pytest.mark.parametrize("make", ["unsummed", "bucketed"])
def test_gradients_are_clipped_in_one_pass_as_in_two(make: str, share: float) -> None:
    """The same bits and the same norm, whether they are measured while they are multiplied or before."""
    once, twice = (measured_by({"unsummed": unsummed, "bucketed": bucketed}[make]) for _ in range(2))
    with patch.object(Kernels, "joint_norm", autospec=True, side_effect=Kernels.joint_norm) as measured:
        model, gradients, norm = once
        assert gradients.clip(share * norm, believed=norm, written=False) == norm
        assert measured.call_count == (share != 0.5)  # too small a factor, or none: no pass that writes
        other, gradients, _ = twice
        assert gradients.clip(share * norm, believed=norm, written=True) == norm
        assert measured.call_count == (share != 0.5) + 1
    assert all(map(torch.equal, found_in(model), found_in(other)))
    assert float(gradients.measured()) == pytest.approx(min(share, 1.0) * norm, rel=1e-5)


@kernels_built
@pytest.mark.parametrize("by", [10.0, 0.3, 0.01, math.inf])
def test_gradients_that_were_written_behind_all_versions_are_clipped_by_the_norm_that_they_have(by: float) -> None:
    """The norm and, to a rounding, the gradients are those of two passes."""
    (model, gradients, norm), (other, naive, _) = measured_by(unsummed), measured_by(unsummed)
    for each in (model, other):
        for parameter in each.parameters():
            assert parameter.grad is not None
            parameter.grad.data.mul_(by)
    found = gradients.clip(0.1 * norm, believed=norm, written=False)
    wanted = naive.clip(0.1 * norm, believed=norm, written=True)
    assert found == wanted or (math.isnan(found) and math.isnan(wanted))
    torch.testing.assert_close(found_in(model), found_in(other), rtol=3e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("changed", ["nothing", "taken away", "replaced"])
def test_gradients_in_buckets_are_scaled_bucket_by_bucket(changed: str) -> None:
    """In as many calls as there are buckets, where each gradient is there and lies in one; else one by one."""
    model = Net().double()
    gradients, first = bucketed(model), next(model.parameters())
    gradients.start()
    with gradients.backward(last=True):
        model(torch.zeros(2, 4, dtype=torch.int64)).square().sum().backward()
    gradients.reduce()
    assert first.grad is not None
    if changed != "nothing":
        first.grad = None if changed == "taken away" else first.grad.clone()
    expected = {name: 0.5 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    with patch("shoal.gradients.gradients.scale_all", wraps=scale_all) as scaled:
        gradients.scale(0.5)
    assert len(scaled.call_args.args[0]) == (1 if changed == "nothing" else len(expected))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def mixed() -> list[Tensor]:
    """Gradients of which a loop in C takes some: short and long, of two types, and one that is laid out otherwise."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 4), (SPLIT + 1,), (), (0,), (7, SPLIT)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("among", ["alone", "float64", "turned"])
def test_short_gradients_are_measured_and_scaled_with_the_long(
    among: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bits of PyTorch's product, and the norm of all numbers in float64; of several threads, the long ones are
    PyTorch's.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    others = {"alone": [], "float64": [torch.ones(5, dtype=torch.float64)], "turned": [torch.randn(6, 5).T]}
    gradients = mixed() + others[among]
    wanted, whole = [each * 0.3 for each in gradients], torch.cat([each.double().flatten() for each in gradients])
    parameters = [nn.Parameter(each.detach().clone()) for each in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    owned = [owned_whole(t) for t in trained(nn.ParameterList(parameters))]
    norm = norm_of_owned(owned)
    assert norm is not None
    assert float(norm) == pytest.approx(float(whole.norm()), rel=1e-7)
    scale_all(gradients, 0.3)
    assert all(map(torch.equal, gradients, wanted))


@pytest.mark.parametrize("rows", [3, SPLIT + 1])
def test_a_sparse_gradient_among_short_ones_is_measured_by_its_values(rows: int) -> None:
    """A script may put one there, as for `torch.optim.SparseAdam`."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([3.0, 4.0]), (rows,), check_invariants=True)
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(rows))])
    parameters[0].grad, parameters[1].grad = torch.tensor([0.0, 12.0]), sparse
    norm = norm_of_owned([owned_whole(t) for t in trained(parameters)])
    assert norm is not None
    assert float(norm) == pytest.approx(13.0)


def test_autograd_knows_of_a_gradient_that_was_scaled() -> None:
    """As of any write: what a script has computed with it before cannot be differentiated by mistake."""
    weight, gradient = torch.ones(3, requires_grad=True), torch.ones(3)
    penalty = (weight * gradient).sum()
    scale_all([gradient], 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_they_are_what_buckets_hold() -> None:
    """Of parameters that some or no microbatch uses, too, whose gradient is zero."""
    model = Net().double()
    norm, first, expected = agreed(bucketed(model), model)
    gradients = unsummed(model)
    assert isinstance(gradients, UnsummedGradients)
    found_norm, found_first, found = agreed(gradients, model)
    assert found_norm == pytest.approx(norm, rel=NOISE)
    assert found_first == pytest.approx(first, rel=NOISE)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=NOISE, atol=NOISE)


def test_a_script_cannot_wipe_the_sum_between_microbatches() -> None:
    model = Net().double()
    kept, wiped = (agreed(unsummed(model), model, wiping=wiping)[2] for wiping in (False, True))
    assert all(torch.equal(kept[name], wiped[name]) for name in kept)


def test_a_parameter_has_no_hook() -> None:
    """Each would cost a call of Python in every backward."""
    model = Net()
    unsummed(model)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    gradients = unsummed(model)
    gradients.start()
    with gradients.backward(last=True):
        model(torch.tensor([1])).sum().backward()
    with pytest.raises(UserCodeError, match="the gradient of weight is sparse"):
        gradients.reduce()


class Coded:
    """An exchange that does something even of one rank."""

    by_microbatch = False


def test_what_an_exchange_works_on_has_buckets() -> None:
    """Only a plain sum over one rank leaves gradients as they are; and only types in which sums are kept."""
    with pytest.raises(TypeError):  # it has come to making the exchange of a bucket
        build_gradients(
            GradientsConfig(), trained(Net()), zero=None, groups=lambda ranks: Alone(), replica=Alone(),
            model=nn.Identity(), summing=Summing(exchange=Coded()),  # type: ignore[arg-type]
        )  # fmt: skip
    half = nn.Linear(2, 2).bfloat16()
    assert isinstance(unsummed(half), ReplicatedGradients)


@pytest.mark.parametrize("wiping", [None, "to None", "to zero", "some"])
def test_what_is_shown_between_microbatches_is_no_part_of_the_gradient(wiping: str | None) -> None:
    """To the bit, whatever a script's `zero_grad` does with it; a gradient of the script's own is refused as before."""
    torch.manual_seed(0)
    model, found = Net(), []
    shown = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    parameters = list(model.parameters())
    for shows in (False, True):
        gradients = unsummed(model)
        assert isinstance(gradients, VisibleGradients)
        assert not shows or gradients.show_between(shown)
        gradients.start()
        for last in (False, False, True):
            with gradients.backward(last=last):
                model(torch.zeros(2, 4, dtype=torch.int64)).square().sum().backward()
            if shows and not last:
                assert all(p.grad is each for p, each in zip(parameters, shown.values(), strict=True))
                model.zero_grad(set_to_none=True) if wiping == "to None" else None
                model.zero_grad(set_to_none=False) if wiping == "to zero" else None
                parameters[0].grad = torch.zeros_like(parameters[0]) if wiping == "some" else parameters[0].grad
        found.append((float(gradients.reduce()), found_in(model)))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
    gradients.start()
    with gradients.backward(last=False):
        model(torch.zeros(2, 4, dtype=torch.int64)).square().sum().backward()
    parameters[1].grad = torch.ones_like(parameters[1])
    with pytest.raises(UserCodeError, match="is not empty before"), gradients.backward(last=True):
        pass
