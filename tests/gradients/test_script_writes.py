"""What a script writes into weights between two steps, for every kind of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.comm.config import WireConfig
from shoal.comm.exchanges.exchange import PieceCodecs
from shoal.comm.mesh import build_mesh
from shoal.engine.updates import AtOnce
from shoal.errors import UserCodeError
from shoal.gradients.build import Summing
from shoal.gradients.fully_sharded import FullyShardedGradients
from shoal.gradients.gradients import Gradients
from shoal.gradients.masters import MixedPrecision
from shoal.gradients.script_writes import COMPARED_EVERY, Placed, WrittenAlike
from shoal.topology.layout import Layout
from tests.codec.every import codec_of
from tests.comm.local import local_group
from tests.gradients.training import Case, Net, loss_of, microbatches, synced, take_step
from tests.ranks import TestPlace

SUM_ORDER = 1e-12  # float64: only the order of sums differs
MIXED = MixedPrecision(torch.bfloat16)
STAGES = [1, 2, 3]

Full = Callable[[], AbstractContextManager[None]]
"""`full_parameters` of what is tried."""


def evaluated(net: Net, full: Full) -> None:
    """Reads all weights and computes with them, as `run.export` and `run.held_out` do."""
    with full(), torch.no_grad():
        net(torch.zeros(1, 3, dtype=torch.long))
        assert all(not p.detach().isnan().any() for p in net.parameters())


def zeros_meanwhile(net: Net, full: Full) -> None:
    """Evaluates with other data in all parameters."""
    with full():
        backup = [p.data for p in net.parameters()]
        for p in net.parameters():
            p.data = torch.zeros_like(p)
        evaluated(net, full)
        for p, own in zip(net.parameters(), backup, strict=True):
            p.data = own


def zeros_from_one_to_another(net: Net, full: Full) -> None:
    """The same, each part of it in a `full_parameters` of its own."""
    with full():
        backup = [p.data for p in net.parameters()]
        for p in net.parameters():
            p.data = torch.zeros_like(p)
    evaluated(net, full)
    with full():
        for p, own in zip(net.parameters(), backup, strict=True):
            p.data = own


def zeros_in_place(net: Net, full: Full) -> None:
    """Copies of all weights are put back, into the same memory."""
    with full(), torch.no_grad():
        backup = [p.clone() for p in net.parameters()]
        for p in net.parameters():
            p.zero_()
    evaluated(net, full)
    with full(), torch.no_grad():
        for p, own in zip(net.parameters(), backup, strict=True):
            p.copy_(own)


def exchanged(net: Net, full: Full) -> None:
    """Two parameters of one block, and two of different ones, give each other their data."""
    with full():
        first, last = net.blocks[0], net.blocks[2]
        for a, b in ((first.linear.bias, first.norm.bias), (first.norm.weight, last.norm.weight)):
            a.data, b.data = b.data, a.data


def transposed(net: Net, full: Full) -> None:
    """A square matrix shows its own memory in another order."""
    with full():
        weight = net.blocks[1].linear.weight
        weight.data = weight.data.t()


def halved(net: Net, full: Full) -> None:
    """New data that stays."""
    with full():
        net.norm.weight.data = net.norm.weight.data * 0.5


def shortened(net: Net, full: Full) -> None:
    with full():
        net.blocks[0].linear.weight.data = net.blocks[0].linear.weight.data.view(-1)


def in_float32(net: Net, full: Full) -> None:
    with full():
        net.norm.weight.data = net.norm.weight.data.float()


def tied(net: Net, full: Full) -> None:
    with full():
        net.blocks[0].norm.bias.data = net.blocks[0].linear.bias.data


@contextmanager
def case_on(place: TestPlace, case: Case, summing: Summing | None = None) -> Iterator[tuple[Net, Gradients, Callable]]:
    """The model, its gradients, and what takes a step."""
    wire = WireConfig(timeout_s=180)
    mesh = build_mesh(case.layout, place.rank, store=place.store, device=torch.device("cpu"), wire=wire)
    net, sync = synced(case, mesh, summing)
    optimizer = torch.optim.SGD([each.parameter for each in sync.owned], lr=0.1, momentum=0.9)
    steps = count()

    def step() -> None:
        take_step(net, sync, optimizer, microbatches(case, next(steps), mesh.rank), case.clip_norm)

    yield net, sync, step
    sync.close()


def edited(place: TestPlace, case: Case, edit: Callable[[Net, Full], None] | None) -> tuple[list[Tensor], list[Tensor]]:
    """What the optimizer of this rank has after two steps, an edit, and two more steps; and the whole weights."""
    with case_on(place, case) as (net, sync, step):
        step()
        step()
        if edit is not None:
            edit(net, sync.full_parameters)
        step()
        step()
        owned = [each.parameter.detach().clone() for each in sync.owned]
        with sync.full_parameters():
            return owned, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("edit", [zeros_meanwhile, zeros_from_one_to_another, exchanged, transposed, halved])
def test_weights_are_what_the_script_has_left(ranks, edit: Callable, zero: int) -> None:
    """As where the optimizer has the model's own parameters, which PyTorch alone has a hand in."""
    _, wanted = ranks(2, edited, Case(Layout(replicate=2)), edit)[0]
    for _, found in ranks(2, edited, Case(Layout(shard=2), zero), edit):
        assert max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True)) < SUM_ORDER


@pytest.mark.parametrize("edit", [zeros_meanwhile, zeros_from_one_to_another, zeros_in_place])
@pytest.mark.parametrize("zero", [None, *STAGES])
def test_weights_that_are_put_back_leave_the_masters_alone(ranks, edit: Callable, zero: int | None) -> None:
    """All 24 bits of each."""
    layout = Layout(replicate=2) if zero is None else Layout(shard=2)
    case = Case(layout, zero, dtype=torch.float32, mixed=MIXED)
    for (found, _), (wanted, _) in zip(ranks(2, edited, case, edit), ranks(2, edited, case, None), strict=True):
        assert all(map(torch.equal, found, wanted))


def clipped_in_forwards(place: TestPlace, case: Case, way: str) -> list[Tensor]:
    """The weights after three steps of a model of which two layers clip their own weights, `in place` or as other data.
    Between each forward and its backward all weights are looked at; or a pipeline's schedule computes the step.
    """

    def clip(module: nn.Module, args: tuple) -> None:
        weight = module.get_parameter("weight")
        if way.startswith("other data"):
            weight.data = weight.data.clamp(-0.1, 0.1)
        else:
            weight.data.clamp_(-0.1, 0.1)

    with case_on(place, case) as (net, sync, _):
        for module in (net.blocks[1].get_submodule("linear"), net.norm):
            module.register_forward_pre_hook(clip)
        optimizer = torch.optim.SGD([each.parameter for each in sync.owned], lr=0.1, momentum=0.9)
        for number in range(3):
            sync.start()
            (batch,) = microbatches(case, number, place.rank)
            with sync.schedule() if way == "scheduled" else nullcontext():
                loss = loss_of(net, *batch)
                if way == "scheduled":
                    loss.backward()
            if way != "scheduled":
                evaluated(net, sync.full_parameters)
                with sync.backward(last=True):
                    loss.backward()
            sync.reduce()
            if way != "other data, unseen":
                sync.expose([name for name, _ in net.named_parameters()])
                sync.accept_weights()
            optimizer.step()
            sync.gather()
        with sync.full_parameters():
            return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("way", ["in place", "other data", "scheduled"])
def test_what_a_forward_writes_is_kept(ranks, way: str, zero: int) -> None:
    """Of a block and of what is in none."""
    wanted = ranks(2, clipped_in_forwards, Case(Layout(replicate=2)), way)[0]
    for found in ranks(2, clipped_in_forwards, Case(Layout(shard=2), zero), way):
        assert max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True)) < SUM_ORDER


def unseen(place: TestPlace, case: Case) -> str:
    with pytest.raises(UserCodeError) as raised:
        clipped_in_forwards(place, case, "other data, unseen")
    return str(raised.value)


@pytest.mark.parametrize(
    "case",
    [Case(Layout(shard=2), 1), Case(Layout(replicate=2), dtype=torch.float32, mixed=MIXED)],
    ids=["ZeRO-1", "masters"],
)
def test_data_that_an_update_has_not_seen_is_refused(ranks, case: Case) -> None:
    """As without `accept`: the optimizer has stepped the numbers of before."""
    for found in ranks(2, unseen, case):
        assert "was given other data (.data = ...) where an update cannot see it" in found


def masked(place: TestPlace, case: Case, edit: Callable[[Net, Full], None]) -> bool:
    """Whether an edit outlives masks that change when the next step begins, and hide nothing."""
    masks = Mock(begin=Mock(return_value=True))
    with case_on(place, case) as (net, sync, step):
        step()
        edit(net, sync.full_parameters)
        wanted = net.norm.weight.detach().clone()
        policy = AtOnce(sync, torch.optim.SGD([each.parameter for each in sync.owned]), leaves_out=[masks])
        policy.begin(Mock(step=1))
        return torch.equal(net.norm.weight, wanted)


def halved_in_place(net: Net, full: Full) -> None:
    with full(), torch.no_grad():
        net.norm.weight.mul_(0.5)


@pytest.mark.parametrize("edit", [halved, halved_in_place])
def test_masks_are_put_on_what_a_script_has_written(ranks, edit: Callable) -> None:
    """The masters that they are put on have it by then."""
    for case in (Case(Layout(shard=2), 1), Case(Layout(replicate=2), dtype=torch.float32, mixed=MIXED)):
        assert all(ranks(2, masked, case, edit))


def refusal(place: TestPlace, zero: int, edit: Callable[[Net, Full], None]) -> str:
    with pytest.raises(UserCodeError) as raised:
        edited(place, Case(Layout(shard=place.size), zero), edit)
    return str(raised.value)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            shortened,
            "blocks.0.linear.weight was given data of shape [36] and type float64 in the place of shape [6, 6]",
        ),
        (in_float32, "norm.weight was given data of shape [6] and type float32 in the place of"),
        (tied, "blocks.0.norm.bias and blocks.0.linear.bias were given the same memory by .data"),
    ],
)
def test_data_that_makes_another_model_is_refused(ranks, edit: Callable, sentence: str, zero: int) -> None:
    """Where it is read back, on every rank."""
    for found in ranks(2, refusal, zero, edit):
        assert sentence in found


def forward_writes(place: TestPlace, first: int, block: bool) -> str:
    """What is said about a forward that clips its own weight from its call `first` on; "" for nothing in 4 steps."""
    calls = count(1)

    def clip(module: nn.Linear, args: tuple) -> None:
        if next(calls) >= first:
            module.weight.data.clamp_(-0.01, 0.01)

    summing = Summing(pieces=PieceCodecs(weights=codec_of("int8")))
    with case_on(place, Case(Layout(shard=place.size), 3), summing) as (net, _, step):
        (net.blocks[1].get_submodule("linear") if block else net.norm).register_forward_pre_hook(clip)
        try:
            for _ in range(4):
                step()
        except UserCodeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("block", [True, False])
def test_what_a_forward_writes_is_refused_where_pieces_are_coded(ranks, block: bool) -> None:
    """In the forward of a block, or the backward of what is in no block; nothing is said where nothing is written."""
    for found in ranks(2, forward_writes, 3, block):
        assert "a forward wrote into its own weights" in found
    assert ranks(2, forward_writes, 99, block) == ["", ""]


def written_by(place: TestPlace, writers: int) -> str:
    """What is said where the first ranks write a number of one rank's piece; "" for nothing."""
    with case_on(place, Case(Layout(shard=place.size), 3)) as (net, sync, step):
        step()
        assert isinstance(sync, FullyShardedGradients)
        try:
            with sync.full_parameters(), torch.no_grad():
                if place.rank < writers:
                    net.blocks[1].get_submodule("linear").weight.data[-1, -1] += 1e-9
        except UserCodeError as error:
            return str(error)
    return ""


def test_weights_that_some_ranks_write_are_refused_where_each_keeps_its_piece(ranks) -> None:
    for found in ranks(2, written_by, 1):
        assert "linear.weight was written by the script" in found
        assert "the first and number 2 have other numbers" in found
    assert ranks(2, written_by, 2) == ranks(2, written_by, 0) == ["", ""]


def test_ranks_compare_what_they_have_written() -> None:
    """In the first readings and one of a hundred; each of them names the parameter whose numbers differ."""

    def readings(group: Collective) -> list[str]:
        place, said = torch.zeros(3), []
        placed = [Placed(name, nn.Parameter(), each) for name, each in (("a", torch.ones(2)), ("b", place))]
        alike = WrittenAlike(group)
        for number in range(1, 2 * COMPARED_EVERY + 1):
            place.fill_(group.rank if number in (2, COMPARED_EVERY - 1, COMPARED_EVERY) else number)
            try:
                alike.compare(placed)
            except UserCodeError as refusal:
                said.append(f"{number}: {refusal}")
        return said

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(readings, local_group(3)))
    assert found[0] == found[1] == found[2]
    assert [each.split(" was written")[0] for each in found[0]] == ["2: b", f"{COMPARED_EVERY}: b"]
    assert all("the first and number 2 have other numbers" in each for each in found[0])
