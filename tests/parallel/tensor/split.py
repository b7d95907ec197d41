"""A model split over tensor ranks beside the same model on one, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.comm.config import WireConfig
from shoal.comm.mesh import Mesh, build_mesh
from shoal.memory.recompute import recompute
from shoal.parallel.tensor.plan import TensorPart, split_tensor
from shoal.parallel.tensor.summa import Grid, lines_of
from shoal.parallel.tensor.vocabulary import gather_logits, vocabulary_cross_entropy
from shoal.topology.layout import Layout
from tests.ranks import TestPlace

# Sums of a few hundred float64 numbers in another order.
F64 = {"rtol": 1e-12, "atol": 1e-13}


class Outcome(NamedTuple):
    """What one rank got: losses of each sample, logits or outputs where gathered, gradients and what it holds."""

    loss: float
    outputs: Tensor
    grads: dict[str, Tensor]
    parts: dict[str, TensorPart]


def tensor_group(place: TestPlace) -> Collective:
    """All ranks of the test along `tensor`."""
    return tensor_mesh(place).axis("tensor")


def tensor_mesh(place: TestPlace) -> Mesh:
    """The mesh of those ranks."""
    layout, device = Layout(tensor=place.size), torch.device("cpu")
    return build_mesh(layout, place.rank, store=place.store, device=device, wire=WireConfig(timeout_s=180))


def grid_of(mesh: Mesh, rows: int) -> Grid:
    """Those ranks in rows, one after the other."""
    row, column = lines_of(range(mesh.layout.tensor), mesh.rank, rows=rows)
    return Grid(mesh.ranks(row), mesh.ranks(column))


def weighted(losses: Tensor) -> Tensor:
    """A sum in which no two positions count alike."""
    return (losses * torch.linspace(0.5, 1.5, losses.numel(), dtype=losses.dtype).view_as(losses)).sum()


def one_step(
    place: TestPlace,
    make: Callable[..., nn.Module],
    inputs: Sequence[Tensor],
    targets: Tensor,
    settings: dict[str, Any],
) -> Outcome:
    """Forward and backward of `make(**model)` split over all ranks.

    Of the settings, `gather` takes the loss from gathered logits, `rows` are those of a grid, `recompute` is that of
    `shoal.memory`, and the others are those of `split_tensor`.
    """
    settings = dict(settings)
    mesh, gather, rows = tensor_mesh(place), settings.pop("gather", False), settings.pop("rows", None)
    group, grid = mesh.axis("tensor"), None if rows is None else grid_of(mesh, rows)
    model = make(**settings.pop("model", {}))
    kind = settings.pop("recompute", "none")
    plan = split_tensor(model, group, grid=grid, **settings)
    recompute(model, kind)
    outputs = model(*inputs)
    if plan.vocabulary is None:
        whole, losses = outputs, outputs.square().sum(-1)
    elif gather:
        whole = gather_logits(outputs, plan.vocabulary, group)
        losses = entropy(whole, targets)
    else:
        whole = gather_logits(outputs.detach(), plan.vocabulary, group)
        losses = vocabulary_cross_entropy(outputs, targets, split=plan.vocabulary, group=group)
    loss = weighted(losses)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss.item(), whole.detach().clone(), grads, plan.parts)


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of whole logits."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)


def assembled(outcomes: Sequence[Outcome], model: nn.Module) -> dict[str, Tensor]:
    """The whole gradients: parts laid side by side; of each part, the sum of its twins' terms, or any one's whole."""
    whole, counted = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
    for place, outcome in enumerate(outcomes):
        assert outcome.parts.keys() == whole.keys()
        for name, part in outcome.parts.items():
            assert place in part.twins
            (box,) = part.boxes(tuple(whole[name].shape))
            where = box.slices
            counted[name][where] += place == part.twins[0]
            if part.partial or place == part.twins[0]:
                own = whole[name][where]
                assert own.shape == outcome.grads[name].shape, name
                own += outcome.grads[name]
            if not part.partial:  # each twin has the whole
                assert torch.equal(outcome.grads[name], outcomes[part.twins[0]].grads[name]), f"{name}: twins differ"
    for name, times in counted.items():
        assert bool((times == 1).all()), f"{name}: not every number has one group of twins"
    return whole
