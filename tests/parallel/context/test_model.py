"""A whole GPT whose sequences are split over context ranks, in real processes, against one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.config import WireConfig
from shoal.comm.mesh import Mesh, build_mesh
from shoal.comm.volume import bytes_sent
from shoal.memory.recompute import recompute
from shoal.memory.tracker import measured_activation_bytes
from shoal.models.attention_config import AttentionConfig, Causal, SlidingWindow, SparseAttentionConfig
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.models.layers import set_sample_keys
from shoal.parallel.context.core import positions
from shoal.parallel.context.fetch import fetch_of
from shoal.parallel.context.kinds import KINDS, ContextKind, put_context
from shoal.parallel.context.ulysses import kv_copies
from shoal.topology.layout import Layout
from tests.ranks import TestPlace

VOCABULARY, BATCH, SEQ = 40, 3, 32
SLOW_S = 120.0  # a worker imports a part of torch at its first recomputation
SIZES: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1}
# Other orders of the same float64 sums; angles of rotary positions are the same float32 on both sides.
RELATIVE = 1e-12
# Beside the exact quarter: Ulysses keeps its result before and after the exchange.
QUARTER = {"ring": 0.252, "allgather": 0.252, "ulysses": 0.27}


MASK = SlidingWindow(window=3, block=2)


# Bytes that a context rank sends for one attention, forward and backward: closed forms beside the wire's own count.
#
# With K the bytes of a rank's keys, and C ranks:
#
#     ring        2 K (C - 1) forward; the same again and the gradients, 2 K' (C - 1), backward
#     allgather   2 K (C - 1) forward; the same again and a reduce-scatter of 2 K' C backward
#     ulysses     (C - 1) / C of query, keys, values and result, each way; keys and values in `kv_copies`
#     mask        keys and values of the blocks that others need forward, gradients of those that it fetched backward
#
# K' is K in float32 at least: terms of gradients are added up in a wide type.


WIDE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """One attention of a rank: `tokens` are the rank's own, over all its samples."""

    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    element_bytes: int


def attention_bytes_sent(kind: ContextKind, sizes: AttentionSizes, *, size: int, backend: str) -> int:
    """Bytes sent by one of `size` ranks for one forward and backward; documents not counted."""
    numel = sizes.tokens * sizes.kv_heads * sizes.head_size
    block, wide_block = 2 * numel * sizes.element_bytes, 2 * numel * max(WIDE_BYTES, sizes.element_bytes)
    if kind == "ulysses":
        heads = 2 * sizes.heads + 2 * sizes.kv_heads * kv_copies(sizes.kv_heads, size)
        each_way = sizes.tokens * heads * sizes.head_size * sizes.element_bytes
        return 2 * bytes_sent("all_to_all", each_way, size=size, backend=backend)
    if kind == "ring":
        return (2 * block + wide_block) * (size - 1)
    gradients = bytes_sent("reduce_scatter", wide_block * size, size=size, backend=backend)
    return 2 * bytes_sent("all_gather", block, size=size, backend=backend) + gradients


def fetched_bytes_sent(
    config: SparseAttentionConfig, sizes: AttentionSizes, *, size: int, rank: int, tokens: int
) -> int:
    """Bytes that `rank` sends for one forward and backward under a mask, of sequences of which it holds `tokens` each;
    documents not counted.
    """
    fetch = fetch_of(config, tokens * size // config.block, size=size, rank=rank)
    block = 2 * sizes.tokens // tokens * config.block * sizes.kv_heads * sizes.head_size * sizes.element_bytes
    return block * (sum(fetch.to_each) + sum(fetch.from_each))


def gpt(attention: AttentionConfig = Causal()) -> nn.Module:
    model = build(GPTConfig(vocabulary=VOCABULARY, attention=attention, **SIZES))
    initialise(model, seed=0, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.ndim >= 2 else 1.0)
    return model


def batch(*, packed: bool) -> dict[str, Tensor | None]:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=g)
    documents = (torch.randint(0, 9, (BATCH, SEQ), generator=g) == 0).cumsum(1)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": torch.rand(BATCH, SEQ, generator=g, dtype=torch.float64),
        "places": torch.arange(SEQ).expand(BATCH, SEQ),
        "documents": documents if packed else None,
    }


def loss_and_gradients(model: nn.Module, parts: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over the tokens given, and what it adds to each gradient."""
    set_sample_keys(model.modules(), torch.arange(BATCH))
    logits = model(parts["tokens"], parts["places"], parts["documents"])
    losses = F.cross_entropy(logits.flatten(0, 1), parts["targets"].flatten(), reduction="none")
    loss = (losses * parts["weights"].flatten()).sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_a_rank(place: TestPlace, kind: Any, *, packed: bool, variant: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss and gradients summed over the ranks, and the bytes that this rank sent for them."""
    mesh = mesh_of(place)
    model = gpt(MASK if "mask" in variant else Causal())
    put_context(model, mesh.axis("context"), kind)
    variant = variant.removeprefix("mask, ")
    if variant in ("selective", "operators", "full"):
        recompute(model, variant)
    here = positions(SEQ, size=place.size, rank=place.rank)
    parts = {name: x if x is None else x.index_select(1, here) for name, x in batch(packed=packed).items()}
    if variant == "rotary offset":
        parts["places"] = None
    if variant == "documents lost" and place.rank == 1:
        parts["documents"] = torch.zeros_like(parts["documents"])
    mesh.ledger.take()
    loss, gradients = loss_and_gradients(model, parts)
    sent = mesh.ledger.total().bytes_sent
    for tensor in (loss, *gradients.values()):
        mesh.world.all_reduce(tensor).wait()
    return loss, gradients, sent


def mesh_of(place: TestPlace) -> Mesh:
    layout = Layout(context=place.size)
    return build_mesh(
        layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=SLOW_S)
    )


def cases(place: TestPlace, kinds: list[tuple[str, bool, str]]) -> list[tuple[Tensor, dict[str, Tensor], int]]:
    place_of = [TestPlace(place.rank, place.size, torch.distributed.PrefixStore(str(i), place.store)) for i in range(9)]
    return [
        on_a_rank(place_of[i], kind, packed=packed, variant=variant) for i, (kind, packed, variant) in enumerate(kinds)
    ]  # fmt: skip


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative distance of a gradient."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - x).norm() / x.norm()) for name, x in wanted.items())


@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_every_gradient_are_those_of_one_process(ranks: Any, size: int) -> None:
    """For each kind, packed or not, dropout included; and the wire carries what the closed form says."""
    every = [(kind, packed, "") for kind in sorted(KINDS) for packed in (False, True)]
    wanted = {packed: loss_and_gradients(gpt(), batch(packed=packed)) for packed in (False, True)}
    sizes = AttentionSizes(tokens=BATCH * SEQ // size, heads=4, kv_heads=2, head_size=8, element_bytes=8)
    for results in ranks(size, cases, every, timeout_s=SLOW_S):
        for (kind, packed, _), (loss, gradients, sent) in zip(every, results, strict=True):
            torch.testing.assert_close(loss, wanted[packed][0], rtol=RELATIVE, atol=0)
            assert worst(gradients, wanted[packed][1]) < RELATIVE
            if not packed:
                form = attention_bytes_sent(kind, sizes, size=size, backend="shm")
                assert sent == SIZES["layers"] * form, kind


@pytest.mark.parametrize("size", [2, 4])
def test_under_a_mask_they_are_as_well_and_the_wire_carries_what_is_seen(ranks: Any, size: int) -> None:
    """Packed or not, recomputed or not; by blocks that are fetched, and by Ulysses."""
    every = [("ring", False, "mask"), ("ring", True, "mask, full"), ("ulysses", True, "mask, selective")]
    wanted = {packed: loss_and_gradients(gpt(MASK), batch(packed=packed)) for packed in (False, True)}
    sizes = AttentionSizes(tokens=BATCH * SEQ // size, heads=4, kv_heads=2, head_size=8, element_bytes=8)
    for rank, results in enumerate(ranks(size, cases, every, timeout_s=SLOW_S)):
        for (_, packed, _), (loss, gradients, _) in zip(every, results, strict=True):
            torch.testing.assert_close(loss, wanted[packed][0], rtol=RELATIVE, atol=0)
            assert worst(gradients, wanted[packed][1]) < RELATIVE
        form = fetched_bytes_sent(MASK, sizes, size=size, rank=rank, tokens=SEQ // size)
        assert results[0][2] == SIZES["layers"] * form
        assert form < attention_bytes_sent("ring", sizes, size=size, backend="shm") / 2


def test_recomputed_attention_calls_the_ranks_again_and_gives_the_same(ranks: Any) -> None:
    """For each kind, with documents and dropout; of the whole blocks and of the cores alone."""
    every = [(kind, True, variant) for kind in sorted(KINDS) for variant in ("selective", "operators", "full")]
    loss, gradients = loss_and_gradients(gpt(), batch(packed=True))
    for results in ranks(2, cases, every, timeout_s=SLOW_S):
        for found in results:
            torch.testing.assert_close(found[0], loss, rtol=RELATIVE, atol=0)
            assert worst(found[1], gradients) < RELATIVE


def held_bytes(place: TestPlace, tokens: int) -> dict[str, int]:
    """Activations of one sequence, or of this rank's slice of it, by kind."""
    group = mesh_of(place).axis("context")
    here = positions(tokens, size=place.size, rank=place.rank)
    held = {}
    for kind in KINDS:
        model = build(GPTConfig(vocabulary=VOCABULARY, layers=2, width=32, heads=4))
        initialise(model, seed=0, device="cpu")
        put_context(model, group, kind)
        forward = partial(model, here[None] % VOCABULARY, here[None])
        held[kind] = measured_activation_bytes(forward)
    return held


def test_a_rank_of_four_holds_a_quarter_of_the_activations(ranks: Any) -> None:
    (whole,) = ranks(1, held_bytes, 1024)
    for part in ranks(4, held_bytes, 1024):
        for kind, held in part.items():
            assert held <= QUARTER[kind] * whole[kind], kind


def test_faults_are_seen(ranks: Any) -> None:
    """Rotary positions that begin at 0 on every rank, and one rank's documents lost."""
    planted = [(kind, True, fault) for kind in sorted(KINDS) for fault in ("rotary offset", "documents lost")]
    wanted = loss_and_gradients(gpt(), batch(packed=True))
    for results in ranks(2, cases, planted):
        for case, (_, gradients, _) in zip(planted, results, strict=True):
            assert worst(gradients, wanted[1]) > 1e-3, case
