"""Float32 master copies of bfloat16 weights, beside naive loops in plain PyTorch and FSDP2's mixed precision."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.gradients.masters import MixedPrecision, in_float32, narrowed
from shoal.gradients.script_writes import read_back_masters
from shoal.state import Trained
from shoal.topology.holding import held
from shoal.topology.layout import Layout
from tests.gradients.training import Block, Case, Net, loss_of, microbatches, optimizer_of, synced, take_step
from tests.ranks import TestPlace

MIXED = MixedPrecision(torch.bfloat16)
SAME = 1e-5
"""Relative to the largest number of a weight: the same bfloat16 gradients, added in float32 in another order."""
ROUNDED_SUMS = 1e-2
"""The same of sums that ranks round to bfloat16, each by 1/512 at most, after six steps of AdamW at a rate of 0.01."""
ALONE, TWO, SHARD = Layout(), Layout(replicate=2), Layout(shard=2)
KINDS = {
    "one rank": (ALONE, None),
    "replicated": (TWO, None),
    "ZeRO-1": (SHARD, 1),
    "ZeRO-2": (SHARD, 2),
    "ZeRO-3": (SHARD, 3),
    "replicated ZeRO-1": (Layout(replicate=2, shard=2), 1),
}


def masters(place: TestPlace, case: Case) -> tuple[list[float], dict[str, Tensor], set[torch.dtype]]:
    """The norms of all steps, what this rank's optimizer has of each weight (flat, and where), the model's types."""
    wire = WireConfig(timeout_s=180)
    mesh = build_mesh(case.layout, place.rank, store=place.store, device=torch.device("cpu"), wire=wire)
    net, sync = synced(case, mesh)
    optimizer = optimizer_of(case, sync)
    norms = [
        take_step(net, sync, optimizer, microbatches(case, step, mesh.rank), case.clip_norm)
        for step in range(case.steps)
    ]
    whole: dict[str, Tensor] = {}
    for owned in sync.owned:
        found = whole.setdefault(owned.name, torch.full(owned.holding.global_shape, torch.nan))
        for box, part in owned.boxes(owned.parameter.detach()):
            found[box.slices] = part
    with sync.full_parameters():
        for name, parameter in net.named_parameters():
            here = ~whole[name].isnan() if name in whole else torch.zeros(parameter.shape, dtype=torch.bool)
            assert torch.equal(parameter.detach()[here], whole.get(name, parameter.detach())[here].bfloat16())
        types = {parameter.dtype for parameter in net.parameters()}
    sync.close()
    return norms, whole, types


def naive(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Float32 weights, a bfloat16 copy of the whole model for each microbatch of each rank, float32 sums."""
    net, copy = Net(tied=False), Net(tied=False).bfloat16()
    named = list(net.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for _, p in named if p.ndim > 1]}, {"params": [p for _, p in named if p.ndim <= 1]}],
        lr=0.01, betas=(0.9, 0.95), weight_decay=0.1,
    )  # fmt: skip
    optimizer.param_groups[1]["weight_decay"] = 0.0
    norms = []
    for step in range(case.steps):
        sums = {name: torch.zeros_like(p) for name, p in named}
        copy.load_state_dict(net.state_dict())
        for rank in range(case.layout.world_size):
            for words, weights in microbatches(case, step, rank):
                copy.zero_grad()
                loss_of(copy, words, weights).backward()
                for name, p in copy.named_parameters():
                    sums[name] += 0 if p.grad is None else p.grad.float()
        for name, p in named:
            p.grad = sums[name]
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), case.clip_norm)))
        optimizer.step()
    return norms, {name: p.detach() for name, p in named}


def farthest(whole: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of what is here, relative to the largest number of its weight."""
    return max(
        float((whole[name] - wanted[name]).nan_to_num().abs().max() / wanted[name].abs().max()) for name in whole
    )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_those_of_a_naive_loop(ranks, kind: str, accumulation: int) -> None:
    """Norms and masters of six steps; every rank computes with their bfloat16 copies, and together they have all."""
    layout, zero = KINDS[kind]
    case = Case(layout, zero, accumulation, dtype=torch.float32, mixed=MIXED)
    norms, wanted = naive(case)
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in wanted.items()}
    for found, whole, types in ranks(layout.world_size, masters, case):
        assert found == pytest.approx(norms, rel=SAME)
        assert farthest(whole, wanted) < SAME
        assert types == {torch.bfloat16}
        for name, tensor in whole.items():
            covered[name] |= ~tensor.isnan()
    assert all(bool(mask.all()) for mask in covered.values())


@pytest.mark.parametrize("kind", ["replicated", "ZeRO-1", "ZeRO-3"])
def test_sums_in_bfloat16_are_near(ranks, kind: str) -> None:
    """Within the rounding of a sum, and not the same bits: the key does something."""
    layout, zero = KINDS[kind]
    mixed = MixedPrecision(torch.bfloat16, reduce_dtype=torch.bfloat16)
    case = Case(layout, zero, dtype=torch.float32, mixed=mixed)
    norms, wanted = naive(case)
    for found, whole, _ in ranks(2, masters, case):
        assert found == pytest.approx(norms, rel=ROUNDED_SUMS)
        assert SAME < farthest(whole, wanted) < ROUNDED_SUMS


class UsesAll(Block):
    """FSDP2 reduces the gradients that there are, and ranks must have the same."""

    def forward(self, x: Tensor, marked: Tensor) -> Tensor:
        return super().forward(x, marked) + 0 * (self.skipped.sum() + self.unused.sum())


def fsdp2(place: TestPlace, case: Case) -> dict[str, Tensor]:
    """The weights that `fully_shard` with its mixed precision trains."""
    store, wait = dist.PrefixStore("fsdp2", place.store), datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=wait)
    try:
        net, mesh = Net(tied=False), init_device_mesh("cpu", (place.size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in net.blocks:
            block.gate = nn.Parameter(block.gate.detach().view(1))  # it refuses parameters without a dimension
            block.__class__ = UsesAll
        for module in (*net.blocks, net):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        named = [(name, p) for name, p in net.named_parameters()]
        groups = [[p for _, p in named if (p.ndim > 1) is matrix] for matrix in (True, False)]
        optimizer = torch.optim.AdamW([{"params": g} for g in groups], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer.param_groups[1]["weight_decay"] = 0.0
        for step in range(case.steps):
            ((words, weights),) = microbatches(case, step, place.rank)
            optimizer.zero_grad()
            loss_of(net, words, weights).backward()
            for _, p in named:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            nn.utils.clip_grad_norm_(net.parameters(), case.clip_norm)
            optimizer.step()
        return {name: p.full_tensor().detach() for name, p in named if isinstance(p, DTensor)}
    finally:
        dist.destroy_process_group()


def test_zero_3_is_fully_shard_with_mixed_precision(ranks) -> None:
    """Six steps of FSDP2 on two ranks come to the same float32 shards."""
    case = Case(SHARD, 3, dtype=torch.float32, mixed=MIXED)
    wanted = ranks(2, fsdp2, case)[0]
    for _, whole, _ in ranks(2, masters, case):
        assert farthest(whole, wanted) < SAME


def written(place: TestPlace, case: Case) -> tuple[Tensor, Tensor]:
    """This rank's masters, before and after a script has written a number into every tenth of each parameter."""
    wire = WireConfig(timeout_s=180)
    mesh = build_mesh(case.layout, place.rank, store=place.store, device=torch.device("cpu"), wire=wire)
    net, sync = synced(case, mesh)
    before = torch.cat([owned.parameter.detach().flatten() for owned in sync.owned])
    with sync.full_parameters():
        for parameter in net.parameters():
            parameter.data.view(-1)[::10] = 0.3
    sync.start()
    sync.close()
    return before, torch.cat([owned.parameter.detach().flatten() for owned in sync.owned])


@pytest.mark.parametrize("kind", ["replicated", "ZeRO-1", "ZeRO-3"])
def test_what_a_script_writes_reaches_the_masters_and_nothing_else_does(ranks, kind: str) -> None:
    """Also by `.data`, which no version counter sees; what was not written keeps all 24 bits."""
    layout, zero = KINDS[kind]
    for before, after in ranks(2, written, Case(layout, zero, dtype=torch.float32, mixed=MIXED)):
        changed = before != after
        assert 0 < int(changed.sum()) < before.numel() // 4
        assert torch.equal(after[changed], torch.full_like(after[changed], 0.3).bfloat16().float())
        assert not torch.equal(after, after.bfloat16().float())


def test_a_master_without_a_change_keeps_its_bits() -> None:
    """Numbers that round up, down, to zero and to infinity, and one that is none."""
    master = torch.tensor([1.001, -3.1415926, 1e-45, 3.4e38, float("nan"), 0.0])
    computed = master.bfloat16()
    kept = master.clone()
    read_back_masters(master, computed)
    assert torch.equal(master.view(torch.int32)[:4], kept.view(torch.int32)[:4])
    computed[1] = 2.0
    read_back_masters(master, computed)
    assert master.tolist()[:4] == [*kept.tolist()[:1], 2.0, *kept.tolist()[2:4]]


def test_batch_norms_stay_in_float32() -> None:
    """PyTorch refuses bfloat16 weights beside float32 statistics; the net then computes, and its norm trains whole."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    trained = [Trained(held(ALONE, 0, name, tuple(p.shape)), p) for name, p in net.named_parameters()]
    found = narrowed(net, trained, MIXED)
    assert {each.holding.name for each in found if each.master is None} == {"1.weight", "1.bias"}
    assert in_float32(net) == {id(net[1].weight), id(net[1].bias)}
    net(torch.randn(3, 1, 4, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}
