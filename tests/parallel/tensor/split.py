"""A model split over tensor ranks beside the same model on one, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.comm.mesh import build_mesh
from shoal.memory.recompute import recompute
from shoal.parallel.tensor.cross_entropy import vocabulary_cross_entropy
from shoal.parallel.tensor.plan import TensorPart, split_tensor
from shoal.parallel.tensor.vocabulary import gather_logits
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
    layout = Layout(tensor=place.size)
    device = torch.device("cpu")
    return build_mesh(layout, place.rank, store=place.store, device=device, timeout_s=20).axis("tensor")


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

    Of the settings, `gather` takes the loss from gathered logits, `recompute` is that of `shoal.memory`, and the others
    are those of `split_tensor`.
    """
    settings = dict(settings)
    group, gather = tensor_group(place), settings.pop("gather", False)
    model = make(**settings.pop("model", {}))
    kind = settings.pop("recompute", "none")
    plan = split_tensor(model, group, **settings)
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
    whole = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for place, outcome in enumerate(outcomes):
        assert outcome.parts.keys() == whole.keys()
        for name, part in outcome.parts.items():
            assert place in part.twins
            if part.partial or place == part.twins[0]:
                own = whole[name] if part.dim is None else whole[name].narrow(part.dim, part.offset, part.length)
                assert own.shape == outcome.grads[name].shape, name
                own += outcome.grads[name]
            if not part.partial:  # each twin has the whole
                torch.testing.assert_close(outcome.grads[name], outcomes[part.twins[0]].grads[name], rtol=0, atol=0)
    return whole
