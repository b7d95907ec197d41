"""Masks in runs: the same in every layout, through restarts, and on the wire."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from shoal.assembly.job import restore
from shoal.assembly.sparse import left_out_in
from shoal.errors import ConfigError, Diverged
from shoal.observe.sink import Sinks
from shoal.sparsity.masks import unpacked
from shoal.sparsity.training import SparseTraining
from tests.assembly.journey import Leg, travel, whole_state
from tests.ranks import TestPlace
from tests.sync.steps import ADAM, Trained, gap, opened, train
from tests.verification.layouts import corpus, verified

SMALL = {"kind": "gpt", "vocabulary": 61, "layers": 2, "width": 16, "heads": 2, "feed_forward_width": 24}
BASE = ADAM | {"model": SMALL}
SUM_ORDER = 1e-10
"""Weights in float64 after 12 steps of AdamW, relative: 1e-12 was seen."""
EVERY_THREE = {"every": 3, "end": 10}
GRADUAL = {"begin": 2, "end": 8, "every": 2}
KINDS: dict[str, dict[str, Any]] = {
    "magnitude": {"kind": "magnitude", "density": 0.2, "schedule": GRADUAL},
    "global": {"kind": "magnitude", "density": 0.2, "distribution": "global", "schedule": GRADUAL},
    "2:4": {"kind": "magnitude", "pattern": "2:4", "schedule": GRADUAL},
    "snip, rows": {"kind": "snip", "density": 0.3, "pattern": "rows", "schedule": {"shape": "one_shot"}},
    "grasp": {"kind": "grasp", "density": 0.3, "schedule": {"begin": 2, "shape": "one_shot"}},
    "l0": {"kind": "l0", "density": 0.2, "schedule": {"begin": 2, "end": 8}},
    "random, blocks": {"kind": "random", "density": 0.5, "pattern": "block", "block": [2, 4], "schedule": GRADUAL},
    "features": {"kind": "magnitude", "density": 0.5, "pattern": "features", "schedule": GRADUAL},
    "heads": {"kind": "magnitude", "density": 0.5, "pattern": "heads", "schedule": GRADUAL},
    "movement": {"kind": "movement", "density": 0.3, "schedule": GRADUAL},
    "set": {"kind": "set", "density": 0.2, "schedule": EVERY_THREE},
    "rigl": {"kind": "rigl", "density": 0.2, "distribution": "erk", "schedule": EVERY_THREE},
    "top_kast": {"kind": "top_kast", "density": 0.2, "trained": 0.4, "schedule": EVERY_THREE},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate": (2, {"layout": {"replicate": 2}}),
    "replicate 4": (4, {"layout": {"replicate": 4}}),
    "ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    "ZeRO-2": (2, {"layout": {"shard": 2}, "memory": {"zero": 2}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}}),
    "tensor": (2, {"layout": {"tensor": 2}}),
    "pipeline": (2, {"layout": {"pipeline": 2}}),
    "replicate x ZeRO-3": (4, {"layout": {"replicate": 2, "shard": 2}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    corpus(folder)
    return folder


def masked(kind: str, **tables: dict[str, Any]) -> dict[str, Any]:
    return BASE | {"sparsity": KINDS[kind]} | tables


def masks_in(state: dict[str, Tensor], name: str = "mask") -> dict[str, Tensor]:
    """Whole masks, by the parameter's name, in its shape."""
    prefix = f"sparsity/{name}/"
    return {
        key.removeprefix(prefix): unpacked(bits, tuple(state[f"model/{key.removeprefix(prefix)}"].shape))
        for key, bits in state.items()
        if key.startswith(prefix)
    }


@pytest.fixture(scope="module")
def alone(ranks, folder: Path) -> dict[str, Trained]:
    """Twelve steps of one process."""
    return {kind: ranks(1, train, masked(kind), str(folder))[0] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_masked_weights_are_zero_and_so_are_their_moments(alone: dict[str, Trained], kind: str) -> None:
    """Every layer but embedding, head and norms is masked, to its density; of features and heads, theirs."""
    state, density = alone[kind].state, KINDS[kind].get("density", 0.5)
    masks, trained = masks_in(state), masks_in(state, "trained")
    assert len(masks) == 2 * {"features": 3, "heads": 4}.get(kind, 7)
    for name, mask in masks.items():
        weight = state[f"model/{name}"]
        assert weight[~mask].count_nonzero() == 0
        assert weight[mask].count_nonzero() > 0.95 * mask.sum()  # but of a feature that nothing reads any more
        for slot in ("exp_avg", "exp_avg_sq"):
            moments = state[f"optimizer/{slot}/{name}"]
            assert moments[~trained.get(name, mask)].count_nonzero() == 0
            assert moments[mask].count_nonzero() > 0
    numbers = sum(mask.numel() for mask in masks.values())
    assert sum(int(mask.sum()) for mask in masks.values()) / numbers == pytest.approx(density, abs=0.02)
    assert state["model/embedding.weight"].count_nonzero() == state["model/embedding.weight"].numel()


@pytest.mark.parametrize(
    "kind", ["rigl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("magnitude", "l0"))]
)
def test_an_average_is_zero_where_weights_are_masked(ranks, folder: Path, kind: str) -> None:
    """Although the update of the step in which masks change still sees the weights."""
    optimizer = {"average": {"kind": "ema", "decay": 0.5}}
    state = ranks(1, train, masked(kind, optimizer=optimizer), str(folder))[0].state
    for name, mask in masks_in(state).items():
        average = state[f"optimizer/average/{name}"]
        assert average[~mask].count_nonzero() == 0
        assert average[mask].count_nonzero() > 0


@pytest.mark.matrix(every=5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_has_the_masks_of_one_process(
    ranks, folder: Path, alone: dict[str, Trained], kind: str, layout: str
) -> None:
    """Bit by bit; and the weights but for the order of sums."""
    world, tables = LAYOUTS[layout]
    found, wanted = ranks(world, train, masked(kind, **tables), str(folder))[0], alone[kind]
    assert found.state.keys() == wanted.state.keys()
    ours, theirs = masks_in(found.state), masks_in(wanted.state)
    assert all(torch.equal(ours[name], mask) for name, mask in theirs.items())
    assert gap(found.weights, wanted.weights) < SUM_ORDER


def test_the_density_is_measured(ranks, folder: Path) -> None:
    found = ranks(2, densities, masked("magnitude", **LAYOUTS["pipeline"][1]), str(folder))
    for densities_of_rank in found:
        assert densities_of_rank[0] == 1.0
        assert densities_of_rank[-1] == pytest.approx(0.2, abs=0.01)
        assert densities_of_rank == sorted(densities_of_rank, reverse=True)


def densities(place: TestPlace, tables: dict[str, Any], folder: str) -> list[float]:
    run, found = opened(place, tables, folder, Path(folder) / "measured"), []
    with closing(run.feed()) as feed:
        for step in range(1, 10):
            run.step(step, feed.next().microbatches, lr=0.01)
            found.append(run.state.figures()["sparsity/density"])
    return found


def test_grasp_keeps_what_the_gradient_would_shrink_without(ranks, folder: Path) -> None:
    """The products that one rank finds are those of the exact Hessian; its weights and gradients are as they were."""
    alone, exact, unchanged = ranks(1, products, masked("grasp"), str(folder))[0]
    assert unchanged
    assert exact.keys() == alone.keys()
    for name, product in exact.items():
        assert torch.allclose(alone[name], product, rtol=1e-6, atol=1e-8 * float(product.abs().max()))


def products(
    place: TestPlace, tables: dict[str, Any], folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """H g of each masked layer in step 2, as the run has it and by differentiating twice; whether all else stayed."""
    run = opened(place, tables, folder, Path(folder) / "products")
    (sparse,) = left_out_in(run.state)
    assert isinstance(sparse, SparseTraining)
    owned = {own.name: own for own in sparse.owners.owned}
    with closing(run.feed()) as feed:
        batch: Any = feed.next().microbatches[0]

    def gradients(create_graph: bool) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            loss = cross_entropy(run.model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        return list(torch.autograd.grad(loss, [own.parameter for own in owned.values()], create_graph=create_graph))

    first = gradients(True)
    along = torch.stack([(g * g.detach()).sum() for g in first]).sum()
    wanted = torch.autograd.grad(along, [own.parameter for own in owned.values()])

    def again() -> None:
        for own, gradient in zip(owned.values(), gradients(False), strict=True):
            assert own.parameter.grad is not None
            own.parameter.grad.copy_(gradient)

    for own, gradient in zip(owned.values(), first, strict=True):
        own.parameter.grad = gradient.detach().clone()
    before = [own.parameter.detach().clone() for own in owned.values()]
    sparse.explore(2, again)
    unchanged = all(
        torch.equal(own.parameter, weight) and torch.equal(own.parameter.grad, gradient)  # pyright: ignore
        for own, weight, gradient in zip(owned.values(), before, first, strict=True)
    )
    found = {name: sparse._measured(own) for name, own in owned.items()}
    return found, dict(zip(owned, wanted, strict=True)), unchanged


SKIPPED = {"l0": 8, "grasp": 2, "snip, rows": 1, "magnitude": 4, "set": 3}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", ["replicate", "ZeRO-3"])
@pytest.mark.parametrize("kind", SKIPPED)
def test_masks_come_although_the_step_that_makes_them_is_skipped(ranks, folder: Path, kind: str, layout: str) -> None:
    """Its loss is not finite. They come with the next; nothing of the skipped step is left in the weights."""
    world, tables = LAYOUTS[layout]
    for committed, density, moved in ranks(world, skips, masked(kind, **tables), str(folder), SKIPPED[kind]):
        assert committed == [step != SKIPPED[kind] for step in range(1, 11)]
        assert density == pytest.approx(KINDS[kind]["density"], abs=0.02)
        assert not moved


def skips(place: TestPlace, tables: dict[str, Any], folder: str, skipped: int) -> tuple[list[bool], float, list[str]]:
    """Which of ten steps counted, the density in the end, and weights that an evaluation after the `skipped` one would
    have found changed.
    """
    run, committed, moved = opened(place, tables, folder, Path(folder) / "skips"), [], []
    with closing(run.feed()) as feed:
        for step in range(1, 11):
            before, spoiled = {}, None
            if step == skipped:
                before = whole_state(run)
                spoiled = run.model.register_forward_hook(lambda _module, _given, found: found * float("nan"))
            committed.append(run.step(step, feed.next().microbatches, lr=0.01).committed)
            if spoiled is not None:
                spoiled.remove()
                after = whole_state(run)
                moved = [name for name in before if name.startswith("model/") and not before[name].equal(after[name])]
    return committed, run.state.figures()["sparsity/density"], moved


def test_products_that_are_not_finite_are_refused(ranks, folder: Path) -> None:
    assert "product of the Hessian with the gradient is not finite" in ranks(1, spoils, masked("grasp"), str(folder))[0]


def spoils(place: TestPlace, tables: dict[str, Any], folder: str) -> str:
    """What is said where the gradient beside the weights is not finite."""
    run = opened(place, tables, folder, Path(folder) / "spoils")
    (sparse,) = left_out_in(run.state)
    assert isinstance(sparse, SparseTraining)

    def again() -> None:
        for own in sparse.owners.owned:
            assert own.parameter.grad is not None
            own.parameter.grad.fill_(float("nan"))

    for own in sparse.owners.owned:
        own.parameter.grad = torch.ones_like(own.parameter)
    try:
        sparse.explore(2, again)
    except Diverged as error:
        return str(error)
    return "nothing"


def test_n_of_m_holds_in_every_row(alone: dict[str, Trained]) -> None:
    for mask in masks_in(alone["2:4"].state).values():
        assert (mask.view(-1, 4).sum(1) == 2).all()


def test_what_trains_from_the_start_moves_weights_and_keeps_its_density(ranks, folder: Path) -> None:
    """Against the same run with changes that never come."""
    still = ranks(1, train, masked("rigl", sparsity=KINDS["rigl"] | {"schedule": {"every": 100}}), str(folder))[0]
    moved = ranks(1, train, masked("rigl"), str(folder))[0]
    before, after = masks_in(still.state), masks_in(moved.state)
    assert all(mask.sum() == after[name].sum() for name, mask in before.items())
    assert any(not torch.equal(mask, after[name]) for name, mask in before.items())


def test_top_kast_trains_weights_that_wait(alone: dict[str, Trained]) -> None:
    """Every weight has a value, and only those of the wider mask have moved from their first ones."""
    state = alone["top_kast"].state
    kept, trained = masks_in(state), masks_in(state, "trained")
    for name, mask in kept.items():
        waiting = state[f"sparsity/waiting/{name}"]
        assert (trained[name] | ~mask).all(), "what is computed with is trained"
        assert waiting[mask].count_nonzero() == 0
        assert waiting[~mask].count_nonzero() == (~mask).sum()


def test_a_ticket_keeps_the_largest_weights_of_another_run(ranks, tmp_path: Path) -> None:
    """Those of its last checkpoint, while the weights themselves are those of an early one, in every layout."""
    corpus(tmp_path)
    early = ranks(1, train, BASE, str(tmp_path), 0, 2, "dense")[0].state
    shutil.copytree(tmp_path / "dense", tmp_path / "early")
    late = ranks(1, train, BASE, str(tmp_path), 2, 10, "dense")[0].state
    ticket = {"kind": "lottery", "density": 0.25, "ticket": str(tmp_path / "dense")}
    tables = BASE | {"sparsity": ticket, "run": {"warm_start": str(tmp_path / "early")}}
    first = [ranks(world, first_weights, tables | layout, str(tmp_path))[0] for world, layout in TICKETS]
    name = "blocks.0.attention.query.weight"
    kept = late[f"model/{name}"].abs() >= late[f"model/{name}"].abs().flatten().topk(64).values[-1]
    assert torch.equal(first[0][name], early[f"model/{name}"] * kept)
    assert all(torch.equal(other[name], first[0][name]) for other in first)


def test_a_ticket_goes_on_with_the_samples_that_came_next(ranks, tmp_path: Path) -> None:
    """Its third step of data is the dense run's; other data are refused."""
    corpus(tmp_path)
    ranks(1, train, BASE, str(tmp_path), 0, 2, "dense")
    ticket = {"kind": "lottery", "density": 0.25, "ticket": str(tmp_path / "dense")}
    start = {"warm_start": str(tmp_path / "dense")}
    tables = BASE | {"sparsity": ticket}
    later = ranks(2, first_positions, tables | {"run": start | {"warm_start_data": True}}, str(tmp_path))[0]
    assert later == [16, 24]
    assert ranks(2, first_positions, tables | {"run": start}, str(tmp_path))[0] == [0, 8]
    other = tables | {"run": start | {"warm_start_data": True, "seed": 9}}
    with pytest.raises(
        AssertionError, match=r"run.warm_start_data: .* was trained with run.seed = 0, and this run has 9"
    ):
        ranks(1, first_positions, other, str(tmp_path))


def first_positions(place: TestPlace, tables: dict[str, Any], folder: str) -> list[int]:
    """Where the first two steps stand in the order of the samples."""
    run = opened(place, tables, folder, Path(folder) / "sparse")
    restore(run, Path(folder) / "sparse", Sinks())
    with closing(run.feed()) as feed:
        return [feed.next().interval.start for _ in range(2)]


TICKETS = [(1, {}), (2, {"layout": {"replicate": 2}}), (2, {"layout": {"shard": 2}})]


def first_weights(place: TestPlace, tables: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """What the first forward of a run computes with."""
    run = opened(place, tables, folder, Path(folder) / "sparse")
    restore(run, Path(folder) / "sparse", Sinks())
    (sparse,) = left_out_in(run.state)
    if sparse.begin(1):
        run.generation.gradients.gather()
    with run.generation.gradients.full_parameters():
        return {t.holding.name: t.parameter.detach().clone() for t in run.trained}


JOURNEYS = [
    ("magnitude", ["replicate", "ZeRO-3"]),
    ("rigl", ["ZeRO-3", "pipeline"]),
    ("movement", ["tensor", "ZeRO-1"]),
    ("l0", ["ZeRO-3", "replicate"]),
    ("top_kast", ["pipeline", "replicate"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layouts"), JOURNEYS)
def test_a_run_resumes_in_the_middle_of_its_schedule(
    ranks, folder: Path, kind: str, layouts: list[str], tmp_path: Path
) -> None:
    """In every bit in the same world, and in another one with every bit of what was saved."""
    corpus(tmp_path)

    def leg(layout: str, name: str, steps: int) -> Leg:
        world, tables = LAYOUTS[layout]
        return ranks(world, travel, masked(kind, **tables), str(tmp_path), name, steps)[0]

    whole = leg(layouts[0], "whole", 9)
    first, second = leg(layouts[0], "halves", 4), leg(layouts[0], "halves", 5)
    assert first.losses + second.losses == whole.losses
    assert second.left.keys() == whole.left.keys()
    assert all(torch.equal(second.left[name], tensor) for name, tensor in whole.left.items())
    begun, gone_on = leg(layouts[0], "abroad", 4), leg(layouts[1], "abroad", 5)
    assert all(torch.equal(gone_on.came[name], tensor) for name, tensor in begun.left.items())
    ours, theirs = masks_in(gone_on.left), masks_in(whole.left)
    assert all(torch.equal(ours[name], mask) for name, mask in theirs.items())
    assert (
        gap(
            {n: t for n, t in gone_on.left.items() if n.startswith("model/")},
            {n: t for n, t in whole.left.items() if n.startswith("model/")},
        )
        < SUM_ORDER
    )


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("layout", ["replicate", "ZeRO-3", "tensor", "pipeline"])
@pytest.mark.parametrize("kind", ["magnitude", "rigl", "grasp"])
def test_verify_proves_a_run_under_masks(ranks, folder: Path, kind: str, layout: str) -> None:
    """Its one process decides masks by itself. Masks change at steps 2 and 3."""
    world, tables = LAYOUTS[layout]
    often = {"sparsity": KINDS[kind] | {"schedule": {"begin": 2, "end": 8, "every": 1}}}
    verdict, *_ = ranks(world, verified, masked(kind, **tables, **often), str(folder), False, 4)
    assert verdict["holds"], verdict["sentence"]


REFUSED = [
    ({"sparsity": KINDS["features"] | {"layers": ["*.query.weight"]}}, "make and read the same features"),
    ({"sparsity": KINDS["magnitude"] | {"layers": ["blocks.7.*"]}}, 'layers: "blocks.7.*" matches no trained weight'),
    ({"sparsity": {"kind": "magnitude", "pattern": "2:5"}}, "which is no multiple of 5"),
    ({"sparsity": KINDS["magnitude"] | {"layers": ["embedding*"]}, "model": SMALL | {"tied": True}}, "is tied"),
    ({"sparsity": KINDS["snip, rows"] | {"density": 0.01}}, "leaves nothing of blocks.0.attention.query.weight"),
]


def refused(place: TestPlace, tables: dict[str, Any], folder: str) -> str:
    with pytest.raises(ConfigError) as found:
        opened(place, BASE | tables, folder, Path(folder) / "refused")
    return str(found.value)


@pytest.mark.parametrize(("tables", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_cannot_be_masked_is_refused(ranks, folder: Path, tables: dict[str, Any], sentence: str) -> None:
    assert sentence in ranks(1, refused, tables, str(folder))[0]
