"""ZeRO-1, -2 and -3 against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.conditions import Conditions, Fault
from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.gradients.build import build_gradients
from shoal.gradients.config import GradientsConfig
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.state import Trained
from shoal.topology.holding import held
from shoal.topology.layout import Layout
from tests.gradients.training import MOMENTUM, Case, loss_of, microbatches, optimizer_of, plain, synced, trajectory
from tests.ranks import TestPlace

SUM_ORDER = 1e-12  # float64, a few steps of Adam: only the order of sums differs
LAYERS = 6
PADDING = 0.06  # pieces end on cache lines: 4 lines of a chunk at most
FAULT = 1e-4  # what a planted fault changes at least, relative


def furthest(place: TestPlace, case: Case, conditions: Conditions | None = None) -> float:
    """The largest difference from one process, in norms and parameters, relative to the largest number."""
    norms, parameters = trajectory(place, case, conditions)
    wanted_norms, wanted = plain(case)
    worst = max(abs(a - b) / b for a, b in zip(norms, wanted_norms, strict=True))
    assert parameters.keys() == wanted.keys()
    return max([worst, *(float((parameters[n] - w).abs().max() / w.abs().max()) for n, w in wanted.items())])


LAYOUTS = [Layout(shard=2), Layout(shard=4), Layout(replicate=2, shard=2), Layout(shard=2, context=2)]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("zero", [None, 1, 2, 3])
def test_every_stage_trains_like_one_process(ranks, zero: int | None, layout: Layout, accumulation: int) -> None:
    """Tied, unused, tiny and conditionally used parameters, clipped, accumulated: the weights are those of one."""
    case = Case(layout, zero, accumulation=accumulation)
    worst = max(ranks(layout.world_size, furthest, case))
    assert worst < SUM_ORDER, worst


@pytest.mark.parametrize("zero", [1, 3])
def test_momentum_is_cut_like_any_state(ranks, zero: int) -> None:
    """SGD with momentum, on more ranks than some parameters have numbers."""
    assert max(ranks(4, furthest, Case(Layout(shard=4), zero, optimizer=MOMENTUM))) < SUM_ORDER


FAULTS = [
    (1, Fault("reduce_scatter", 2, "drop")),  # a bucket that keeps this rank's own terms
    (2, Fault("reduce_scatter", 2, "drop")),
    (1, Fault("all_gather", 1, "drop")),  # pieces of the step before
    (3, Fault("all_gather", 7, "drop")),
    (2, Fault("all_reduce", 1, "drop")),  # a norm, or a sum over the other replica
    (3, Fault("reduce_scatter", 1, "corrupt")),
]


@pytest.mark.parametrize(("zero", "fault"), FAULTS)
def test_what_a_wire_leaves_out_shows(ranks, zero: int, fault: Fault) -> None:
    """The comparison has teeth: a stale piece, or a sum without the other's term, gives other weights."""
    case = Case(Layout(replicate=2, shard=2), zero)
    results = ranks(4, furthest, case, Conditions(faults=[fault]))
    assert not max(results) < FAULT, results  # NaN counts as a difference


def state_of(place: TestPlace, zero: int) -> tuple[int, int, int]:
    """Numbers of optimizer state, of gradients that stay, and of parameters that are there between two steps."""
    layout = Layout(shard=4)
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    net = nn.Sequential(*(nn.Linear(60, 60) for _ in range(LAYERS)))
    trained = [Trained(held(layout, mesh.rank, n, tuple(p.shape)), p) for n, p in net.named_parameters()]
    sync = build_gradients(
        GradientsConfig(bucket_bytes=40_000),
        trained,
        zero=zero,
        model=net,
        groups=mesh.ranks,
        replica=mesh.world,
        blocks=list(net),
    )
    optimizer = optimizer_of(Case(), sync)
    sync.start()
    with sync.backward(last=True):
        net(torch.ones(2, 60)).sum().backward()
    sync.reduce()
    optimizer.step()
    sync.gather()
    moments = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    gradients = [o.parameter.grad for o in sync.owned if o.parameter.grad is not None]
    return stored(moments), stored(gradients), stored(list(net.parameters()))


def stored(tensors: list[Tensor]) -> int:
    """The float32 numbers in the memory that tensors lie in."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) // 4


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_rank_holds_its_share(ranks, zero: int) -> None:
    """Optimizer state is a fourth in every stage, gradients from stage 2 on, parameters in stage 3."""
    numbers = LAYERS * 61 * 60
    for moments, gradients, parameters in ranks(4, state_of, zero):
        assert moments == pytest.approx(2 * numbers / 4, rel=PADDING)
        assert gradients == pytest.approx(numbers if zero == 1 else numbers / 4, rel=PADDING)
        if zero < 3:
            assert parameters == pytest.approx(numbers, rel=PADDING)
        else:
            assert parameters <= 2 * LAYERS  # one NaN each, and the pieces, which are the optimizer's


def in_a_schedule(place: TestPlace, case: Case) -> float:
    """Microbatches as a pipeline computes them: all forwards, then all backwards, against the engine's way."""
    mesh = build_mesh(
        case.layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180)
    )
    gradients = []
    for piped in (False, True):
        net, sync = synced(case, mesh)
        batches = microbatches(case, 0, mesh.rank)
        sync.start()
        if piped:
            with sync.schedule():
                for loss in [loss_of(net, *batch) for batch in batches]:
                    loss.backward()
        else:
            for number, batch in enumerate(batches):
                loss = loss_of(net, *batch)
                with sync.backward(last=number == len(batches) - 1):
                    loss.backward()
        sync.reduce()
        gradients.append([o.parameter.grad for o in sync.owned])
        sync.close()
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("zero", [None, 1, 2, 3])
def test_a_schedule_is_an_accumulation(ranks, zero: int | None) -> None:
    """Several microbatches under way at once, with hooks that fire for each, give the same sums."""
    case = Case(Layout(shard=2), zero, accumulation=3)
    assert max(ranks(2, in_a_schedule, case)) < SUM_ORDER


class Recomputed(nn.Module):
    """Blocks that compute their forward again in the backward: each as a whole, or the inner part of it."""

    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outside = outside
        self.blocks = nn.ModuleList(Inner(checkpointed=not outside) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.outside else block(x)
        return x


class Inner(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)
        return torch.tanh(y + x)


def gradient_error(place: TestPlace, build: Callable[[], nn.Module]) -> float:
    """Gradients of ZeRO-3 beside those of the same model alone; `build` gives it, its blocks in `blocks`."""
    layout = Layout(shard=2)
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    alone, net = build().double(), build().double()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    alone(x).square().sum().backward()
    trained = [Trained(held(layout, mesh.rank, n, tuple(p.shape)), p) for n, p in net.named_parameters()]
    sync = build_gradients(
        GradientsConfig(), trained, zero=3, model=net, groups=mesh.ranks, replica=mesh.world, blocks=list(net.blocks)
    )
    sync.start()
    loss = net(x.chunk(2)[mesh.rank]).square().sum()
    with sync.backward(last=True):
        loss.backward()
    sync.reduce()
    wanted, worst = {n: p.grad for n, p in alone.named_parameters()}, 0.0
    for owned in sync.owned:
        for region in owned.regions:
            piece = owned.parameter.grad[region.start : region.start + region.box.numel].view(region.box.shape)
            worst = max(worst, float((piece - wanted[owned.name][region.box.slices]).abs().max()))
    return worst


@pytest.mark.parametrize("outside", [True, False])
def test_recompute_finds_its_parameters(ranks, outside: bool) -> None:
    """A block under a checkpoint, or with one inside it, sees whole parameters when it computes again."""
    assert max(ranks(2, _recomputed, outside)) < SUM_ORDER


def _recomputed(place: TestPlace, outside: bool) -> float:
    return gradient_error(place, lambda: Recomputed(outside=outside))


class InPlace(nn.Module):
    """Each block's output is a view that the next one changes in place: autograd then makes a new graph of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(Changing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = y = (x * self.scale).unflatten(0, (2, -1)).flatten(0, 1)
        for block in self.blocks:
            x = block(x, y)
        return x.tanh_()


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.mul_(0.5)
        z = self.outer(torch.tanh(self.inner(x))) + y.sin()
        return z.unflatten(0, (2, -1)).flatten(0, 1)


def test_a_view_that_is_changed_in_place_hides_no_backward(ranks) -> None:
    """The backward of a block finds its parameters, and keeps them to its end."""
    assert max(ranks(2, _changed_in_place)) < SUM_ORDER


def _changed_in_place(place: TestPlace) -> float:
    return gradient_error(place, InPlace)


def short_sum(place: TestPlace, zero: int) -> tuple[list[torch.dtype], list[float]]:
    """Gradients 1, e, e, e of a bfloat16 parameter, where 1 + e is 1."""
    layout = Layout(shard=place.size)
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    net = nn.Module()
    net.weight = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    trained = [Trained(held(layout, mesh.rank, "weight", (64,)), net.weight)]
    sync = build_gradients(GradientsConfig(), trained, zero=zero, model=net, groups=mesh.ranks, replica=mesh.world)
    sync.start()
    with sync.full_parameters(), sync.backward(last=True):
        (net.weight * (1.0 if mesh.rank == 0 else 2**-9)).sum().backward()
    sync.reduce()
    gradients = [o.parameter.grad for o in sync.owned]
    return [g.dtype for g in gradients], [float(g[0]) for g in gradients]


@pytest.mark.parametrize("zero", [1, 2])
def test_short_gradients_are_added_in_float32(ranks, zero: int) -> None:
    """In bfloat16 the small terms would vanish one by one."""
    for dtypes, values in ranks(4, short_sum, zero):
        assert dtypes == [torch.bfloat16]
        assert values == [1 + 2**-7]


def gpt_losses(place: TestPlace, zero: int | None) -> tuple[float, float]:
    """A GPT's loss in evaluation and the norm of its gradient, with its blocks as units."""
    layout = Layout(shard=place.size)
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    with torch.device("meta"):
        model = build(GPTConfig(vocabulary=17, layers=2, width=16, heads=4, kv_heads=2, tied=True))
    initialise(model, seed=3, device=torch.device("cpu"), dtype=torch.float64)
    trained = [Trained(held(layout, mesh.rank, n, tuple(p.shape)), p) for n, p in model.named_parameters()]
    sync = build_gradients(
        GradientsConfig(),
        trained,
        zero=zero,
        model=model,
        groups=mesh.ranks,
        replica=mesh.world,
        blocks=list(model.get_submodule("blocks").children()),
    )
    tokens = torch.arange(4 * 9).view(4, 9) % 17
    with torch.no_grad():
        evaluated = float(gpt_loss(model, tokens))
    sync.start()
    loss = gpt_loss(model, tokens.chunk(place.size)[mesh.rank])
    with sync.backward(last=True):
        loss.backward()
    return evaluated, float(sync.reduce())


def gpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="sum")


def test_a_gpt_computes_the_same_under_every_stage(ranks) -> None:
    """Its loss without gradients, and the norm of its gradient: stages 1 to 3 beside the all-reduce."""
    wanted = ranks(2, gpt_losses, None)[0]
    for zero in (1, 2, 3):
        for found in ranks(2, gpt_losses, zero):
            assert found == pytest.approx(wanted, rel=SUM_ORDER)
