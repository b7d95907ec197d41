"""Gradients in boxes and whole-shaped shells of split parameters, against whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.errors import UserCodeError
from shoal.gradients.partial_gradient import PartialGradient
from shoal.gradients.split_shells import BoxGradient, Shell
from shoal.state import same_piece
from shoal.topology.holding import AlongTensor, Box, Holding, held
from shoal.topology.layout import Layout
from tests.comm.local import LocalCollective, local_group

EXACT = 1e-12  # float64: only the order of sums differs
COLUMNS = {rank: (Box((0, 3 * rank), (4, 3)),) for rank in range(2)}
TWINS = {rank: (Box((0, 0), (4, 6)),) for rank in range(2)}
"""Both ranks hold all of it, as a head of keys that queries on both share."""
PACKED = {rank: (Box((rank, 0), (1, 6)), Box((2 + rank, 0), (1, 6))) for rank in range(2)}
"""A row of each of two blocks."""


def holding_of(group: LocalCollective, boxes: dict[int, tuple[Box, ...]]) -> Holding:
    """On two ranks of `tensor` for each place along `shard`."""
    twins = boxes is TWINS
    along = AlongTensor(split=True, partial=twins, same=(0, 1) if twins else None)
    layout = Layout(shard=group.size // 2, tensor=2)
    return held(layout, group.rank, "weight", (4, 6), boxes=boxes[group.rank % 2], tensor=along)


def run_on(group: LocalCollective, flat: Tensor) -> tuple[Tensor, int]:
    """The run of the elements that ZeRO gives this rank, and where it begins: not at a row; none for the last."""
    bounds = [0, flat.numel()] if group.size == 2 else [0, 5, flat.numel(), flat.numel()]
    start, stop = bounds[group.rank // 2 :][:2]
    return flat[start:stop].clone(), start


def whole_tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(5)]


WHAT = "the gradient of weight is divided"


def gradients_on(group: LocalCollective) -> list[Any]:
    """Columns, twins and packed rows on this rank, one that ZeRO alone divides, and one that is whole everywhere."""
    *split, unsplit, plain = whole_tensors()
    found: list[Any] = []
    for whole, boxes in zip(split, (COLUMNS, TWINS, PACKED), strict=True):
        holding = holding_of(group, boxes)
        local, start = run_on(group, torch.cat([whole[box.slices].reshape(-1) for box in holding.boxes]))
        counts = group.rank == min(same_piece(holding, holding.holders))
        found.append(BoxGradient(local, holding, group=group, what=WHAT, start=start, counts=counts))
    if group.size > 2:
        local, start = run_on(group, unsplit.reshape(-1))
        unsplit = PartialGradient(local, start, (4, 6), group=group, what=WHAT, counts=group.rank % 2 == 0)
    return [*found, unsplit, plain]


SIZES = pytest.mark.parametrize("size", [2, 6], ids=["tensor", "tensor and ZeRO"])


def on_ranks(size: int, work: Callable[[list[Any]], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda group: work(gradients_on(group)), local_group(size)))


def wholes(gradients: list[Any]) -> Tensor:
    return torch.stack([each.whole() if isinstance(each, PartialGradient) else each for each in gradients])


def parameters_with(gradients: list[Any]) -> list[Parameter]:
    parameters = [Parameter(torch.zeros(4, 6, dtype=torch.float64)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "nothing": lambda gradients: None,
    "scaled in place": lambda gradients: [each.mul_(3) for each in gradients],
    "spread": lambda gradients: [each.add_(torch.arange(6.0, dtype=torch.float64)) for each in gradients],
    "clipped by value": lambda g: torch.nn.utils.clip_grad_value_(parameters_with(g), 0.5),
    "clipped by norm": lambda g: torch.nn.utils.clip_grad_norm_(parameters_with(g), 0.5),
    "clipped in one call": lambda g: torch.nn.utils.clip_grad_norm_(parameters_with(g), 0.5, foreach=True),
    "clipped by the largest": lambda g: torch.nn.utils.clip_grad_norm_(parameters_with(g), 0.5, norm_type="inf"),
    "clipped by the 1-norm": lambda g: torch.nn.utils.clip_grad_norm_(parameters_with(g), 0.5, norm_type=1.0),
}


@SIZES
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_gradients_changes_them_as_whole_ones(name: str, size: int) -> None:
    """Mixed with one that is whole on all ranks."""

    def changed(gradients: list[Any]) -> Tensor:
        CHANGES[name](gradients)
        return wholes(gradients)

    wanted = changed(list(whole_tensors()))
    for found in on_ranks(size, changed):
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


PLACES = torch.arange(24.0, dtype=torch.float64).view(4, 6)
ASKED: dict[str, Callable[[list[Any]], Any]] = {
    "norm": lambda gradients: [each.norm() for each in gradients],
    "norms": lambda gradients: torch._foreach_norm(gradients),
    "sum": lambda gradients: [each.sum() for each in gradients],
    "mean": lambda gradients: [each.mean() for each in gradients],
    "largest": lambda gradients: [each.abs().max() for each in gradients],
    "smallest": lambda gradients: [each.min() for each in gradients],
    "of a new one": lambda gradients: [(each**2 + 1).sqrt().sum() for each in gradients],
    "of a new one beside a whole one": lambda gradients: [((2 * each) * PLACES).sum() for each in gradients],
    "in a tensor of the script's": lambda gradients: [torch.ones(4, 6, dtype=torch.float64).add_(g) for g in gradients],
}


@SIZES
@pytest.mark.parametrize("name", ASKED)
def test_numbers_of_whole_gradients_count_twins_once(name: str, size: int) -> None:
    wanted = torch.stack(list(ASKED[name](list(whole_tensors()))))
    for found in on_ranks(size, lambda gradients: torch.stack(list(ASKED[name](gradients)))):
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


def test_what_needs_the_whole_is_refused() -> None:
    def sorted_(gradients: list[Any]) -> str:
        with pytest.raises(UserCodeError, match="needs the whole") as refusal:
            gradients[0].sort()
        return str(refusal.value)

    assert len(set(on_ranks(2, sorted_))) == 1


@pytest.mark.parametrize("boxes", [COLUMNS, TWINS, PACKED], ids=["columns", "twins", "packed"])
def test_a_shell_is_whole_inside_and_empty_outside(boxes: dict[int, tuple[Box, ...]]) -> None:
    """What is written into the whole is in the part; a gradient that is put into its place is the part's."""
    whole, written, gradient, *_ = whole_tensors()

    def used(group: LocalCollective) -> tuple[Tensor, Tensor, Tensor]:
        own = Parameter(whole.clone())
        holding = holding_of(group, boxes)
        cut = lambda tensor: torch.cat([tensor[box.slices].reshape(-1) for box in holding.boxes])  # noqa: E731
        shape = holding.box.shape if len(holding.boxes) == 1 else (12,)
        shell = Shell(own, Parameter(cut(whole).view(shape)), holding, group)
        with pytest.raises(UserCodeError, match=r"read outside of run\.full_parameters"):
            own.sum()
        assert (own.shape, own.numel()) == ((4, 6), 24)
        shell.fill()
        found = own.detach().clone()
        own.data.copy_(written)
        assert shell(own) is shell.part
        torch.testing.assert_close(cut(written), shell.part.detach().view(-1), rtol=0, atol=0)
        shell.release()
        shell.part.grad = cut(whole).view(shape)
        shell.show(shell.part.grad)
        assert isinstance(own.grad, BoxGradient)
        own.grad = gradient.clone()
        shell.accept()
        shell.show(shell.part.grad)
        torch.testing.assert_close(cut(gradient), shell.part.grad.view(-1), rtol=0, atol=0)
        with pytest.raises(UserCodeError, match="another tensor stands in the place"):
            shell(Parameter(written))
        return found, shell.part.detach(), own.grad.whole()

    with ThreadPoolExecutor(2) as pool:
        for found, _, shown in pool.map(used, local_group(2)):
            torch.testing.assert_close(found, whole, rtol=0, atol=0)
            torch.testing.assert_close(shown, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("boxes", [COLUMNS, TWINS, PACKED], ids=["columns", "twins", "packed"])
def test_a_shell_shows_the_run_of_its_part_that_zero_has(boxes: dict[int, tuple[Box, ...]]) -> None:
    """Numbers that are put into its place are those of the piece: scaled ones, whole ones, and none."""
    whole, gradient, other, *_ = whole_tensors()

    def used(group: LocalCollective) -> tuple[Tensor, Tensor]:
        tensor = local_groups[group.rank // 2][group.rank % 2]
        holding = holding_of(group, boxes)
        cut = lambda tensor: torch.cat([tensor[box.slices].reshape(-1) for box in holding.boxes])  # noqa: E731
        shape = holding.box.shape if len(holding.boxes) == 1 else (12,)
        shell = Shell(Parameter(whole.clone()), Parameter(cut(whole).view(shape)), holding, tensor)
        (local, start), counts = run_on(group, cut(gradient)), group.rank == min(same_piece(holding, holding.holders))
        shell.part.grad = PartialGradient(local, start, shape, group=group, what=WHAT, counts=counts)
        shell.show(shell.part.grad)
        shown = shell.whole.grad
        assert isinstance(shown, BoxGradient)
        shell.whole.grad = shown * 2
        shell.accept()
        scaled = shell.part.grad
        assert isinstance(scaled, PartialGradient)
        torch.testing.assert_close(scaled.local, 2 * local, rtol=0, atol=0)
        found = shown.whole()
        shell.show(scaled)
        shell.whole.grad = other.clone()
        shell.accept()
        torch.testing.assert_close(shell.part.grad, cut(other).view(shape), rtol=0, atol=0)
        shell.whole.grad = None
        shell.accept()
        assert shell.part.grad is None
        return found, shell.part.detach()

    size = 6
    local_groups = [local_group(2) for _ in range(size // 2)]
    with ThreadPoolExecutor(size) as pool:
        for found, _ in pool.map(used, local_group(size)):
            torch.testing.assert_close(found, gradient, rtol=0, atol=0)
