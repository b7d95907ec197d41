"""One mixture on any layout, each rank with its tokens and its experts; put together again, and beside one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.models.mixture import Mixture, MixtureOptions
from shoal.models.router import auxiliary_total, set_auxiliary
from shoal.parallel.expert import ExpertGroups, split_experts
from shoal.topology.layout import Layout
from tests.ranks import TestPlace

WIDTH, HIDDEN, EXPERTS, BATCH = 6, 5, 4, 4
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """A layout and a mixture. `wrong_scale` plants an auxiliary loss without its scale."""

    layout: dict[str, int]
    sequence_parallel: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    seq: int = 8
    padding: int = 0
    wrong_scale: bool = False

    @property
    def of_layout(self) -> Layout:
        return Layout(**self.layout)


@dataclass(frozen=True)
class Outcome:
    """What came out: output, gradients of the input and of every parameter, the weighted losses, the loads."""

    out: Tensor
    gradients: dict[str, Tensor]
    total: Tensor
    loads: Tensor


def layer(case: Case) -> Mixture:
    options = MixtureOptions(
        **{"experts": EXPERTS, "top_k": 2, "expert_width": HIDDEN, "balance": "auxiliary", "balance_coefficient": 0.4,
           "router_z_loss": 0.2, **case.options}
    )  # fmt: skip
    mixture = Mixture(WIDTH, options, feed_forward="swiglu", name="layer").double()
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return mixture


def data(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and a probe `[batch, seq, width]`, the sequences' weights, which tokens are real."""
    generator = torch.Generator().manual_seed(1)
    x, probe = torch.randn(2, BATCH, case.seq, WIDTH, generator=generator, dtype=torch.float64)
    x[0] = x[0, :1]  # all tokens of one sequence choose alike: some experts have no rows, some too many
    real = torch.arange(case.seq).expand(BATCH, case.seq) < case.seq - case.padding * torch.arange(BATCH)[:, None]
    return x, probe, torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64), real


def alone(case: Case) -> Outcome:
    """The reference: one process."""
    x, probe, weights, real = data(case)
    return _run(layer(case), x, probe=probe, weights=weights, real=real, positions=None, scale=SCALE)


def on_rank(place: TestPlace, case: Case) -> Outcome:
    """The same on one rank of the layout."""
    layout, rank = case.of_layout, place.rank
    mesh = build_mesh(layout, rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    groups = ExpertGroups(
        mesh.axis("expert"), mesh.axis("tensor"), mesh.axis("context", "tensor"), case.sequence_parallel
    )
    mixture = layer(case)
    split_experts(mixture, groups)
    x, probe, weights, real = data(case)
    rows, columns = samples_of(case, rank), positions_of(case, rank)
    stream = columns.tensor_split(layout.tensor)[layout.index("tensor", rank)] if case.sequence_parallel else columns
    return _run(
        mixture, x[rows][:, stream], probe=probe[rows][:, stream], weights=weights[rows], real=real[rows][:, columns],
        positions=columns.expand(len(rows), -1), scale=1.0 if case.wrong_scale else SCALE,
    )  # fmt: skip


def _run(
    mixture: Mixture, x: Tensor, *, probe: Tensor, weights: Tensor, real: Tensor, positions: Tensor | None, scale: float
) -> Outcome:
    x = x.clone().requires_grad_()
    auxiliary = set_auxiliary(mixture, weights, real=real)
    out = mixture(x, positions)
    auxiliary.scale = scale
    (out * probe).sum().backward()
    gradients = {name: p.grad for name, p in mixture.named_parameters()} | {"x": x.grad}
    assert all(gradient is not None for gradient in gradients.values())
    found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return Outcome(out.detach(), found, auxiliary_total(mixture), mixture.router.loads)


def samples_of(case: Case, rank: int) -> Tensor:
    """Which samples a rank sees."""
    layout = case.of_layout
    share = layout.index("replicate", rank) * layout.shard + layout.index("shard", rank)
    return torch.arange(BATCH).chunk(layout.replicate * layout.shard)[share]


def positions_of(case: Case, rank: int) -> Tensor:
    """Which places of the sequence the ranks of its context place have: chunks i and 2C - 1 - i of 2C."""
    layout = case.of_layout
    if layout.context == 1:
        return torch.arange(case.seq)
    place, chunks = layout.index("context", rank), torch.arange(case.seq).chunk(2 * layout.context)
    return torch.cat((chunks[place], chunks[-1 - place]))


def assembled(case: Case, outcomes: list[Outcome], *, leave_out: int | None = None) -> Outcome:
    """The whole from its parts, summed over the ranks that the layout names.

    `leave_out` plants a fault: the router's gradient of that rank is dropped.
    """
    layout, reference = case.of_layout, data(case)[0]
    out, dx = torch.zeros_like(reference), torch.zeros_like(reference)
    gradients: dict[str, Tensor] = {}
    for rank, outcome in enumerate(outcomes):
        rows, columns = samples_of(case, rank), positions_of(case, rank)
        if case.sequence_parallel:
            columns = columns.tensor_split(layout.tensor)[layout.index("tensor", rank)]
        for whole, own in ((out, outcome.out), (dx, outcome.gradients["x"])):
            known = whole[rows[:, None], columns]
            assert not known.any() or torch.equal(known, own), f"rank {rank} differs from one with the same tokens"
            whole[rows[:, None], columns] = own
        for name, gradient in outcome.gradients.items():
            if name != "x":
                whole = gradients.setdefault(name, torch.zeros(EXPERTS, *gradient.shape[1:], dtype=gradient.dtype))
                first = layout.index("expert", rank) * len(gradient) if name.startswith("experts") else 0
                whole[first : first + len(gradient)] += 0 if name == "router.weight" and rank == leave_out else gradient
    total, loads = (sum(getattr(o, name) for o in outcomes) for name in ("total", "loads"))
    return Outcome(out, {**gradients, "x": dx}, total, loads)  # pyright: ignore[reportArgumentType]


def differences(one: Outcome, other: Outcome, *, tolerance: float) -> list[str]:
    """Names of what is not the same, by the norm of the difference."""
    pairs = {"out": (one.out, other.out), "total": (one.total, other.total)}
    pairs |= {name: (gradient, other.gradients[name]) for name, gradient in one.gradients.items()}
    names = [name for name, (a, b) in pairs.items() if (a - b).norm() > tolerance * b.norm()]
    return names + ([] if torch.equal(one.loads, other.loads) else ["loads"])
