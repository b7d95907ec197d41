"""Batch normalisation over declared groups of samples."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.errors import UserCodeError
from shoal.models import batch_norm
from shoal.models.batch_norm import FUSED_GROUPS, GroupedBatchNorm, StepStatistics, with_grouped_norm
from shoal.models.joint_commit import JointCommit

GROUP = 4
# The same sums in float64; only the last bits may differ with their order.
REL_F64 = 1e-12


def images(samples: int, *, seed: int = 0) -> torch.Tensor:
    return 3 + 2 * torch.randn(samples, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(**options: float) -> GroupedBatchNorm:
    return GroupedBatchNorm(3, GROUP, **options).double()


def test_one_group_is_pytorchs_batch_norm() -> None:
    """The batch as one group: output, gradients and, after a commit, running statistics are nn.BatchNorm2d's."""
    ours, theirs = layer(), nn.BatchNorm2d(3).double()
    for norm in (ours, theirs):
        nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(1))
    x, y = images(GROUP).requires_grad_(), images(GROUP).requires_grad_()
    torch.testing.assert_close(ours(x), theirs(y), rtol=REL_F64, atol=REL_F64)
    ours(x).pow(3).sum().backward()
    theirs(y).pow(3).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=REL_F64, atol=1e-10)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=REL_F64, atol=1e-10)
    theirs.reset_running_stats()
    theirs(y)
    ours.commit_sums(ours.step_sums())
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=REL_F64, atol=0)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=REL_F64, atol=0)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(y), rtol=REL_F64, atol=REL_F64)


@settings(max_examples=20)
@given(cuts=st.sets(st.integers(1, 5)))
def test_no_split_into_microbatches_and_replicas_changes_anything(cuts: set[int]) -> None:
    """Outputs, summed statistics and committed buffers are those of the whole batch, wherever groups are cut."""
    x = images(6 * GROUP)
    whole = layer()
    expected = whole(x)
    whole.commit_sums(whole.step_sums())
    edges = [0, *sorted(cuts), 6]
    replicas = [layer() for _ in edges[1:]]
    outputs = [r(x[a * GROUP : b * GROUP]) for r, a, b in zip(replicas, edges, edges[1:], strict=False)]
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=REL_F64, atol=REL_F64)
    total = torch.stack([replica.step_sums() for replica in replicas]).sum(0)
    for replica in replicas:
        replica.commit_sums(total)
        torch.testing.assert_close(replica.running_mean, whole.running_mean, rtol=REL_F64, atol=0)
        torch.testing.assert_close(replica.running_var, whole.running_var, rtol=REL_F64, atol=0)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("places", [False, True], ids=["rows", "pictures"])
@pytest.mark.parametrize("affine", [True, False])
def test_pytorchs_kernel_is_the_operators(
    groups: int, places: bool, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, statistics, gradients and second derivatives, of weights in another type, too."""
    found = []
    for most in (0, FUSED_GROUPS):
        monkeypatch.setattr(batch_norm, "FUSED_GROUPS", most)
        norm = GroupedBatchNorm(3, GROUP, affine=affine)
        x = images(groups * GROUP)
        x = (x if places else x[..., 0, 0]).requires_grad_()
        y = norm(x)
        leaves = [x, *norm.parameters()]
        first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)
        found.append([y.detach(), norm.step_sums(), *first, *second])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5 if one.dtype == torch.float32 else REL_F64, atol=1e-8)


def test_accumulated_forwards_count_as_one_step() -> None:
    """Two microbatches and one commit move the running statistics once, as the batch of both does."""
    x, one, two = images(2 * GROUP), layer(), layer()
    one(x)
    two(x[:GROUP])
    two(x[GROUP:])
    for norm in (one, two):
        norm.commit_sums(norm.step_sums())
    torch.testing.assert_close(two.running_mean, one.running_mean, rtol=REL_F64, atol=0)


def test_a_discarded_or_empty_step_leaves_no_trace() -> None:
    """discard_sums, and a commit of no groups, leave the buffers as they were; a commit starts the sums anew."""
    norm = layer()
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    norm(images(GROUP))
    norm.discard_sums()
    assert not norm.step_sums().any()
    norm.commit_sums(norm.step_sums())
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    norm(images(GROUP))
    norm.commit_sums(norm.step_sums())
    assert not torch.equal(norm.running_mean, before["running_mean"])
    assert not norm.step_sums().any()


def test_evaluation_gathers_nothing_and_needs_no_whole_groups() -> None:
    """eval() leaves the sums alone and takes any number of samples, each for itself."""
    norm = layer().eval()
    x = images(3)
    torch.testing.assert_close(norm(x)[1:2], norm(x[1:2]), rtol=0, atol=0)
    assert not norm.step_sums().any()


def test_incomplete_groups_are_refused_in_training() -> None:
    """The sentence names the batch, the rule and the repair."""
    with pytest.raises(ValueError, match=r"a batch of 6 samples; .* groups of 4, .* a multiple of 4"):
        layer()(images(6))


def test_the_sums_are_no_part_of_a_checkpoint() -> None:
    """Only weights and running statistics are saved; the layer keeps the protocol the engine asks for."""
    assert list(layer().state_dict()) == ["weight", "bias", "running_mean", "running_var"]
    assert isinstance(layer(), StepStatistics)
    assert not isinstance(nn.BatchNorm2d(3), StepStatistics)


def test_half_precision_inputs_are_normalised_in_float32() -> None:
    """bfloat16 images with a large mean are centred, and their mean committed, as statistics in bfloat16 could not."""
    x = (images(GROUP).float() + 97).to(torch.bfloat16)
    norm = GroupedBatchNorm(3, GROUP)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    assert y.float().mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.0] * 3, abs=0.01)
    norm.commit_sums(norm.step_sums())
    assert norm.running_mean.tolist() == pytest.approx((0.1 * x.double().mean(dim=(0, 2, 3))).tolist(), rel=1e-6)


class Activated(nn.BatchNorm2d):
    """A batch norm that ends with an activation, as timm's `BatchNormAct2d`; `calls` times."""

    def __init__(self, channels: int, calls: int = 1) -> None:
        super().__init__(channels)
        self.act, self.calls = nn.PReLU(), calls

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            input = F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
            )
        return self.act(input)


def test_what_a_subclass_adds_to_a_batch_norm_stays() -> None:
    """One group: outputs, gradients of the norm and of the activation, and evaluation are those of the subclass."""
    theirs, ours = (nn.Sequential(Activated(3)).double() for _ in range(2))
    with_grouped_norm(ours, GROUP)
    assert isinstance(ours[0], GroupedBatchNorm)
    named = {name for name, _ in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == named == {"0.weight", "0.bias", "0.act.weight"}
    for model in (theirs, ours):
        model(images(GROUP)).pow(2).sum().backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=REL_F64, atol=1e-10)
    ours[0].commit_sums(ours[0].step_sums())
    for model in (theirs, ours):
        model.eval()
    torch.testing.assert_close(ours(images(7)), theirs(images(7)), rtol=REL_F64, atol=REL_F64)
    assert not ours[0].step_sums().any()


def test_a_hook_of_a_batch_norm_stays() -> None:
    """Its output is what the next layer gets."""
    model = nn.Sequential(nn.BatchNorm2d(3)).double()
    model[0].register_forward_hook(lambda module, inputs, output: output + 100)
    with_grouped_norm(model, GROUP)
    assert model(images(GROUP)).min() > 50


def test_a_subclass_that_normalises_twice_is_refused() -> None:
    """By its name, since the statistics of one call can be replaced."""
    model = nn.Sequential(Activated(3, calls=2)).double()
    with_grouped_norm(model, GROUP)
    with pytest.raises(UserCodeError, match=r"Activated called F\.batch_norm 2 times"):
        model(images(GROUP))


def test_a_batch_norm_in_two_places_is_one() -> None:
    """Its running statistics are of both."""
    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(norm, norm)
    with_grouped_norm(model, GROUP)
    assert model[0] is model[1]


class Shifted(nn.BatchNorm2d):
    """A batch norm that hands `F.batch_norm` something else than its own `changed`, or has a parameter more."""

    def __init__(self, changed: str) -> None:
        super().__init__(3)
        self.changed = changed
        if changed == "slope":
            self.slope = nn.Parameter(torch.ones(3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        given = {"weight": self.weight, "bias": self.bias, "training": self.training, "eps": self.eps}
        other = {"weight": self.weight.abs() + 1, "bias": None, "training": False, "eps": 1.0}
        given |= {name: value for name, value in other.items() if name == self.changed}
        return F.batch_norm(input, self.running_mean, self.running_var, **given)


@pytest.mark.parametrize("changed", ["weight", "bias", "training", "eps", "slope", ""])
def test_a_subclass_whose_own_would_be_left_out_is_refused(changed: str) -> None:
    """What the call is given beside the layer's own, and parameters that the layer alone has."""
    model = nn.Sequential(Shifted(changed)).double()
    if changed == "slope":
        with pytest.raises(UserCodeError, match="has 'slope', which PyTorch's batch norms have not"):
            with_grouped_norm(model, GROUP)
        return
    with_grouped_norm(model, GROUP)
    if changed:
        with pytest.raises(UserCodeError, match="another weight, bias, eps or training"):
            model(images(GROUP))
    else:
        model(images(GROUP))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_norms_take_their_sums_at_once_as_one_by_one(dtype: torch.dtype) -> None:
    """The same bits, also of one that has seen nothing, and of one whose momentum has changed."""
    torch.manual_seed(0)
    norms = [GroupedBatchNorm(width, 2, momentum=0.1 * (1 + width), affine=width != 3) for width in (3, 1, 8)]
    for norm in norms:
        norm.running_mean, norm.running_var = norm.running_mean.to(dtype), norm.running_var.to(dtype)
    others = copy.deepcopy(norms)
    joint = JointCommit.of(norms)
    assert joint is not None
    for step in range(3):
        for norm, other in zip(norms, others, strict=True):
            for _ in range(0 if step == norm.channels else 2):
                mean, var = torch.randn(norm.channels), torch.rand(norm.channels)
                for each in (norm, other):
                    each.add(mean, var, count=3)
            norm.momentum = other.momentum = norm.momentum / (1 + step)
        assert torch.equal(joint.gathered(), torch.cat([other.step_sums() for other in others]))
        joint(joint.gathered())
        for other in others:
            other.commit_sums(other.step_sums())
        for norm, other in zip(norms, others, strict=True):
            for name, found in norm.named_buffers():
                assert found.dtype == other.get_buffer(name).dtype
                assert torch.equal(found, other.get_buffer(name)), (step, norm.channels, name)
            assert not norm.totals.any()


def test_a_module_with_statistics_of_its_own_takes_them_itself() -> None:
    """Also among norms, or where a subclass commits otherwise."""

    class Other(GroupedBatchNorm):
        def commit_sums(self, total: torch.Tensor) -> None: ...

    assert JointCommit.of([]) is None
    assert JointCommit.of([GroupedBatchNorm(2, 2), Other(2, 2)]) is None
