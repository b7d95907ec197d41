"""A whole MoE GPT, split over experts together with tensor, context and shard, against one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.collective import Alone, Collective
from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.models.batch_norm import StepStatistics
from shoal.models.build import build, initialise
from shoal.models.config import MoEConfig
from shoal.models.layers import set_sample_keys
from shoal.models.mixture import RecordRoutes, Routes, loads, mixtures_of, set_routes
from shoal.models.router import auxiliary_total, counted_tokens, set_auxiliary
from shoal.parallel.context.core import positions
from shoal.parallel.context.kinds import put_context
from shoal.parallel.expert import ExpertGroups, ExpertPart, split_experts
from shoal.parallel.tensor.plan import TensorPart, split_tensor
from shoal.parallel.tensor.vocabulary import vocabulary_cross_entropy
from shoal.topology.layout import Layout
from tests.ranks import TestPlace

VOCABULARY, BATCH, SEQ, SCALE = 31, 4, 16, 0.01
# Other orders of the same float64 sums, through two blocks.
RELATIVE = 1e-12


class Found(NamedTuple):
    """What one process or rank got. `loss` is that of its tokens, `auxiliary` what the routers add to it."""

    loss: Tensor
    auxiliary: Tensor
    gradients: dict[str, Tensor]
    routes: Routes
    parts: dict[str, TensorPart | ExpertPart]
    loads: dict[str, Tensor]


def model_of(keys: dict[str, Any]) -> nn.Module:
    """Weights are larger than usual, so that attention and gates are far from uniform."""
    config = MoEConfig(
        vocabulary=VOCABULARY, layers=3, width=16, heads=4, kv_heads=2, experts=4, expert_width=6, shared_experts=1,
        first_dense=1, feed_forward_width=12, router_z_loss=0.01, dropout=0.1, tied=True, **keys,
    )  # fmt: skip
    with torch.device("meta"):
        model = build(config)
    initialise(model, seed=0, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.ndim >= 2 else 1.0)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and weights; some samples end early, and the last is filler."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=generator)
    weights = torch.rand(BATCH, SEQ, generator=generator, dtype=torch.float64)
    weights[1, SEQ - 5 :], weights[3] = 0, 0
    return tokens[:, :-1], tokens[:, 1:], weights


def step(model: nn.Module, rows: Tensor, columns: Tensor, losses_of: Any) -> Found:
    """Forward and backward on some tokens of some samples; loads count once they are committed."""
    tokens, targets, weights = batch()
    set_sample_keys(model.modules(), rows)
    real = counted_tokens(weights, SEQ)
    set_auxiliary(model, weights.sum(1)[rows], SCALE, real=real[rows][:, columns], samples=rows)
    routes = Routes()
    set_routes(model, RecordRoutes(routes))
    cut = lambda x: x[rows][:, columns]  # noqa: E731
    losses = losses_of(model(cut(tokens), columns.expand(len(rows), -1)), cut(targets))
    loss = (losses * cut(weights)).sum() * SCALE
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Found(loss.detach(), auxiliary_total(model) * SCALE, gradients, routes, {}, loads(mixtures_of(model)))


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def on_rank(place: TestPlace, sizes: dict[str, int], sequence_parallel: bool, keys: dict[str, Any]) -> Found:
    """What one rank of the layout got, with the part of each parameter that it holds."""
    layout = Layout(**sizes)
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    model, tensor, context = model_of(keys), mesh.axis("tensor"), mesh.axis("context")
    plan = split_tensor(model, tensor, sequence_parallel=sequence_parallel)
    groups = ExpertGroups(mesh.axis("expert"), tensor, mesh.axis("context", "tensor"), sequence_parallel)
    experts = split_experts(model, groups)
    put_context(model, context, "ring")
    share, of = mesh.batch_share
    rows = torch.arange(BATCH).chunk(of)[share]
    columns = positions(SEQ, size=context.size, rank=context.rank)
    split = plan.vocabulary
    losses = entropy if split is None else lambda o, t: vocabulary_cross_entropy(o, t, split=split, group=tensor)
    found = step(model, rows, columns, losses)
    commit(model, mesh.world)
    counts = tensor.rank == 0  # the loss of the tokens is the same along tensor, the routers' is of other tokens
    return found._replace(loss=found.loss * counts, parts={**plan.parts, **experts})


def commit(model: nn.Module, group: Collective) -> None:
    """What the engine does at the end of a step."""
    for module in model.modules():
        if isinstance(module, StepStatistics):
            sums = module.step_sums()
            group.all_reduce(sums).wait()
            module.commit_sums(sums)


def assembled(results: list[Found], layout: Layout, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole gradients, summed over all ranks that hold terms, laid side by side where they hold parts."""
    whole = {name: torch.zeros_like(gradient) for name, gradient in like.items()}
    for rank, found in enumerate(results):
        assert found.gradients.keys() == found.parts.keys() == whole.keys()
        for name, part in found.parts.items():
            dim, terms = part.dim, True
            if isinstance(part, TensorPart):
                terms = part.partial or layout.index("tensor", rank) == part.twins[0]
            own = whole[name] if dim is None else whole[name].narrow(dim, part.offset, part.length)
            own += found.gradients[name] if terms else 0
    return whole


LAYOUTS = [
    ({"shard": 2, "expert": 2}, False),
    ({"tensor": 2, "expert": 2}, False),
    ({"tensor": 2, "expert": 2}, True),
    ({"context": 2, "expert": 2}, False),
    ({"context": 2, "tensor": 2, "expert": 4}, True),
    ({"shard": 2, "tensor": 2, "expert": 4}, False),
    ({"replicate": 2, "tensor": 2, "expert": 1}, True),
]
KEYS: list[dict[str, Any]] = [
    {"capacity_factor": 0.8, "balance": "auxiliary", "balance_coefficient": 0.3},
    {"gate": "sigmoid", "balance": "bias", "bias_rate": 0.01},
]


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("keys", KEYS, ids=["auxiliary", "bias"])
@pytest.mark.parametrize(("sizes", "sequence_parallel"), LAYOUTS)
def test_loss_gradients_routes_and_biases_are_those_of_one_process(
    ranks: Any, sizes: dict[str, int], sequence_parallel: bool, keys: dict[str, Any]
) -> None:
    """With dropout, shared experts, capacity, filler and early ends; every gradient within float64 rounding."""
    model, layout = model_of(keys), Layout(**sizes)
    reference = step(model, torch.arange(BATCH), torch.arange(SEQ), entropy)
    commit(model, Alone())
    results = ranks(layout.world_size, on_rank, sizes, sequence_parallel, keys)
    for term in ("loss", "auxiliary"):
        total = sum(getattr(found, term) for found in results)
        torch.testing.assert_close(total, getattr(reference, term), rtol=RELATIVE, atol=0)
    for name, gradient in assembled(results, layout, reference.gradients).items():
        assert relative(gradient, reference.gradients[name]) < RELATIVE, name
    routes = Routes()
    for found in results:
        routes.merge(found.routes.tables)
        assert_tables_equal({"loads": found.loads}, {"loads": reference.loads})
    assert_tables_equal(routes.tables, reference.routes.tables)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def assert_tables_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert {name: table.keys() for name, table in found.items()} == {n: table.keys() for n, table in wanted.items()}
    for name, table in wanted.items():
        assert all(torch.equal(rows, found[name][key]) for key, rows in table.items()), name


def test_parts_are_boxes_of_the_unsplit_parameters(ranks: Any) -> None:
    """Each rank keeps its experts' slice, and the values are the slice's."""
    results = ranks(2, kept)
    whole = dict(model_of({}).named_parameters())
    for rank, (parts, values) in enumerate(results):
        assert len(parts) == 2 * 3
        for name, part in parts.items():
            assert part == ExpertPart(0, 2 * rank, 2)
            assert torch.equal(values[name], whole[name].detach().narrow(0, part.offset, part.length))


def kept(place: TestPlace) -> tuple[dict[str, ExpertPart], dict[str, Tensor]]:
    mesh = build_mesh(Layout(shard=2, expert=2), place.rank, store=place.store, device=torch.device("cpu"))
    model, alone = model_of({}), mesh.axis("tensor")
    parts = split_experts(model, ExpertGroups(mesh.axis("expert"), alone, alone))
    return parts, {name: p.detach() for name, p in model.named_parameters() if name in parts}
