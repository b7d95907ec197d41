"""What frozen blocks give, kept: the same gradients without them, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collective import Alone, Collective
from shoal.errors import UserCodeError
from shoal.models.build import initialise
from shoal.models.config import GPTConfig, MoEConfig
from shoal.models.gpt import GPT
from shoal.models.huggingface.build import build
from shoal.models.huggingface.config import TransformersConfig
from shoal.models.keyed_draws import KeyedDraws
from shoal.sparsity.block_cache import CachedBlocks, KeptSamples
from shoal.sparsity.config import FreezeConfig
from shoal.sparsity.freezing import freeze
from tests.assembly.journey import whole_state
from tests.comm.local import local_group
from tests.models.huggingface.architectures import BERT
from tests.ranks import TestPlace
from tests.sync.steps import ADAM, LR, STEPS, Tables, gap, opened, train
from tests.verification.layouts import corpus

SUM_ORDER = 1e-8
"""Weights in float64 after 12 steps of AdamW, relative."""
MIB, CPU = 1 << 20, torch.device("cpu")


def counted_blocks(model: nn.Module, blocks: list[nn.Module]) -> list[int]:
    """How often each block has computed, counted from now on. Call it before the blocks are cached."""
    calls = [0] * len(blocks)

    def counting(number: int, forward: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            calls[number] += 1
            return forward(*args, **named)

        return call

    for number, block in enumerate(blocks):
        block.forward = counting(number, block.forward)
    return calls


def half_frozen_gpt(**keys: Any) -> GPT:
    model = GPT(GPTConfig(vocabulary=61, layers=4, width=16, heads=2, **keys))
    initialise(model, seed=1, device="cpu", dtype=torch.float64)
    freeze(model, FreezeConfig(layers=("embedding", "blocks.0", "blocks.1")))
    return model


def half_frozen_bert() -> nn.Module:
    config = BERT["config"] | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 4}
    model = build(TransformersConfig(architecture=BERT["architecture"], config=config)).double()
    freeze(model, FreezeConfig(layers=("*.embeddings", "*.layer.0", "*.layer.1")))
    return model


@pytest.mark.parametrize("kind", ["gpt", pytest.param("bert", marks=pytest.mark.slow)])
def test_frozen_blocks_compute_a_sample_once_and_gradients_stay(kind: str) -> None:
    """And once more when the first batch is found whole, in whatever order and company samples come then."""
    model = half_frozen_gpt() if kind == "gpt" else half_frozen_bert()
    blocks = list(model.get_submodule("blocks" if kind == "gpt" else "bert.encoder.layer").children())
    tokens = torch.randint(0, 61, (6, 8), generator=torch.Generator().manual_seed(0))
    batches = [tokens[:3], tokens[3:], tokens[[4, 0]], tokens[[1, 5, 2]], tokens[:4], 60 - tokens[:1]]

    def gradients(batch: Tensor) -> list[Tensor]:
        found = model(batch)
        logits = found if isinstance(found, Tensor) else found.logits
        trained = [p for p in model.parameters() if p.requires_grad]
        return [g for g in torch.autograd.grad(logits.square().sum(), trained, allow_unused=True) if g is not None]

    wanted = [gradients(batch) for batch in batches]
    calls = counted_blocks(model, blocks)
    CachedBlocks(model, blocks, KeptSamples(MIB, Alone(), CPU))
    for batch, each in zip(batches, wanted, strict=True):
        assert all(torch.allclose(one, other, rtol=1e-10) for one, other in zip(gradients(batch), each, strict=True))
    assert calls == [4, 4, 6, 6], "two new batches, one found, and a sample that is new"
    with torch.no_grad():
        model(tokens[:2])
    assert calls[0] == 5, "evaluations compute"


class Blocks(nn.Module):
    """Frozen blocks, one behind the other, and a head; `meet` may do more with what each has given."""

    def __init__(
        self,
        *blocks: nn.Module,
        call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x),
        meet: Callable[[list[Tensor]], Tensor] = lambda given: given[-1],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(blocks or [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head: nn.Module = nn.Linear(4, 1)
        self.call, self.meet = call, meet
        self.blocks.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        given = []
        for block in self.blocks:
            x = self.call(block, x)
            given.append(x)
        return self.head(self.meet(given))

    def cached(self) -> Blocks:
        CachedBlocks(self, list(self.blocks), KeptSamples(MIB, Alone(), CPU))
        return self


def epochs(model: nn.Module, number: int, samples: Tensor | None = None) -> list[Tensor]:
    """What `model` gives for the same four batches in each of some epochs."""
    torch.manual_seed(1)
    batches = torch.randn(4, 8, 4).unbind() if samples is None else samples.unbind()
    return [model(batch).detach() for _ in range(number) for batch in batches]


class StochasticDepth(nn.Linear):
    """Leaves a sample in fifty as it was."""

    def forward(self, input: Tensor) -> Tensor:
        return input + (torch.rand(len(input), 1) > 0.02) * super().forward(input)


class Counting(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Blocks(meet=lambda given: given[0] + given[-1]), r"computes \(.*add.*\) with what a frozen block gives"),
        (Blocks(meet=lambda given: torch.stack(given).sum(0)), r"computes \(stack\) with"),
        (Blocks(meet=lambda given: given[-1] + float(given[1].sum())), r"computes \(sum\) with"),
        (Blocks(StochasticDepth(4, 4), nn.Linear(4, 4)), "numbers are drawn before the last frozen block"),
        (Blocks(nn.Linear(4, 4), nn.Dropout(0.01)), r"blocks.1 \(Dropout\) drops features \(p = 0.01\)"),
        (Blocks(nn.Linear(4, 4), nn.BatchNorm1d(4)), r"blocks.1 \(BatchNorm1d\) takes statistics of a batch"),
        (Blocks(nn.Linear(4, 4), Counting()), "changes a buffer of the frozen blocks"),
        (Blocks(*[nn.Linear(4, 4)] * 2), "block 0 is called more than once"),
    ],
    ids=["skip", "sum of hidden states", "number", "stochastic depth", "dropout", "batch norm", "buffer", "shared"],
)
def test_what_depends_on_more_than_the_last_frozen_block_is_refused(model: Blocks, sentence: str) -> None:
    with pytest.raises(UserCodeError, match=sentence):
        epochs(model.cached(), 3)


def test_a_draw_that_is_keyed_by_sample_is_seen_too() -> None:
    model = Blocks(StochasticDepth(4, 4), nn.Linear(4, 4)).cached()
    draws = KeyedDraws(model, seed=0)
    with pytest.raises(UserCodeError, match="numbers are drawn"), draws:
        epochs(model, 1)


def test_blocks_whose_statistics_stand_still_and_dropout_behind_them_are_cached() -> None:
    model = Blocks(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model.blocks[1].eval()
    model.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
    calls = counted_blocks(model, list(model.blocks))
    epochs(model.cached(), 3)
    assert calls == [5, 5, 5], "four batches, and the first one again"


def test_a_mixture_is_refused_in_frozen_blocks() -> None:
    """Its loss and the bias of its router would stand still."""
    config = MoEConfig(vocabulary=61, layers=2, width=16, heads=2, experts=4, balance="bias")
    model = GPT(config)
    initialise(model, seed=1, device="cpu", dtype=torch.float64)
    freeze(model, FreezeConfig(layers=("embedding", "blocks.0")))
    CachedBlocks(model, list(model.blocks), KeptSamples(MIB, Alone(), CPU))
    with pytest.raises(UserCodeError, match="adds to the loss: use a model without mixtures"):
        model(torch.zeros(2, 8, dtype=torch.int64))


def test_hidden_states_without_samples_in_front_are_refused() -> None:
    """Also where there are as many samples as tokens: as soon as samples come in other company."""

    class Turned(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    with pytest.raises(UserCodeError, match=r"block 2 of Turned gives \[5, 3, 4\] for 3 samples"):
        Turned().cached()(torch.randn(3, 5, 4))
    turned = Turned().cached()
    samples = torch.randn(4, 3, 3, 4)
    epochs(turned, 3, samples)
    with pytest.raises(UserCodeError, match="gave something else for the same samples"):
        turned(torch.stack([samples[0, 0], samples[1, 1], samples[2, 2]]))


def test_blocks_may_be_called_with_keywords_alone() -> None:
    plain, cached = (Blocks(call=lambda block, x: block(input=x)) for _ in range(2))
    wanted = epochs(plain, 3)
    calls = counted_blocks(cached, list(cached.blocks))
    assert all(torch.allclose(one, other) for one, other in zip(epochs(cached.cached(), 3), wanted, strict=True))
    assert calls == [5, 5, 5]


def test_a_rank_finds_what_others_keep() -> None:
    """Of samples of several forms. A rank that asks for nothing takes part; a batch that is not whole is not sent."""

    def finds(group: Collective) -> list[Tensor | None]:
        kept = KeptSamples(MIB, group, CPU)
        if group.rank == 0:
            kept.keep([key(1), key(2)], torch.tensor([[1.0], [2.0]], dtype=torch.float64))
        else:
            kept.keep([key(3)], torch.full((1, 2, 3), 3.0))
            kept.keep([key(4)], torch.tensor([4.0]))
        asked = [([1, 2], [3]), ([3, 3], []), ([4], [2, 1]), ([1, 5], [5]), ([], [])]
        return [kept.find([key(number) for number in own[group.rank]]) for own in asked]

    def key(number: int) -> bytes:
        return bytes([number] * 16)

    with ThreadPoolExecutor(2) as pool:
        zero, one = ([None if x is None else x.tolist() for x in each] for each in pool.map(finds, local_group(2)))
    rows = {1: [1.0], 2: [2.0], 3: [[3.0] * 3] * 2, 4: 4.0}
    assert zero == [[rows[1], rows[2]], [rows[3], rows[3]], [rows[4]], None, None]
    assert one == [[rows[3]], None, [rows[2], rows[1]], None, None]


def test_what_another_rank_keeps_is_not_kept_again() -> None:
    """A batch of which one sample is new is computed whole, and only that sample is kept."""

    def holds(group: Collective) -> tuple[bool, list[str], int]:
        kept = KeptSamples(16, group, CPU)
        own = [bytes([number] * 16) for number in ((1, 2), (3, 4))[group.rank]]
        other = [bytes([number] * 16) for number in ((3, 4, 5), (1, 2))[group.rank]]
        for keys in (own, other):
            kept.find(keys)
            whole = kept.keep(keys, torch.ones(len(keys), 1, dtype=torch.float64))
        return whole, kept.take_lines(), len(kept._rows)

    with ThreadPoolExecutor(2) as pool:
        (zero, lines, held), one = pool.map(holds, local_group(2))
    assert one == (True, [], 2)
    assert (zero, held) == (False, 2), "the new one finds no room here"
    assert len(lines) == 1
    assert lines[0].startswith("freeze.cache is full with 2 samples of 8 bytes on this rank, and there are others")


def test_a_full_cache_goes_on_and_remembers_no_more_batches_than_samples() -> None:
    """As with augmentation, where every batch is new."""
    plain, model = Blocks(), Blocks()
    calls = counted_blocks(model, list(model.blocks))
    cached = CachedBlocks(model, list(model.blocks), KeptSamples(3 * 8 * 16, Alone(), CPU))
    samples = torch.randn(9, 8, 4)
    wanted, found = epochs(plain, 3, samples), epochs(model, 3, samples)
    assert all(torch.allclose(one, other) for one, other in zip(found, wanted, strict=True))
    assert calls == [9 * 3 - 5] * 3, "three batches are found in two epochs, the first of them once to compare"
    assert len(cached.take_lines()) == 1
    assert cached.take_lines() == []
    assert len(cached._batches) == 3


@pytest.mark.parametrize("given", [torch.ones(2, 3, dtype=torch.complex64), torch.ones([2] + [1] * 9)])
def test_what_ranks_cannot_send_is_refused(given: Tensor) -> None:
    zero, _ = local_group(2)
    with pytest.raises(UserCodeError, match=r"gives (complex64 of 2|float32 of 10) dims, and ranks send each other"):
        KeptSamples(MIB, zero, CPU).keep([b"1" * 16, b"2" * 16], given)


def test_numbers_that_a_model_is_called_with_tell_samples_apart() -> None:
    class Scaled(Blocks):
        def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
            return super().forward(x * by)

    plain, cached, x = Scaled(), Scaled().cached(), torch.randn(3, 4)
    for _ in range(3):
        cached(x, by=1.0)
    assert torch.equal(cached(x, by=2.0), plain(x, by=2.0))


def test_cached_blocks_that_cannot_be_are_refused() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model = half_frozen_gpt()
    CachedBlocks(model, list(model.blocks), KeptSamples(100, Alone(), CPU))
    with pytest.raises(UserCodeError, match="a sample of 1,024 bytes is more than it may hold"):
        model(tokens)
    model = GPT(GPTConfig(vocabulary=61, layers=2, width=16, heads=2))
    freeze(model, FreezeConfig(layers=("blocks.1",)))
    CachedBlocks(model, list(model.blocks), KeptSamples(MIB, Alone(), CPU))
    with pytest.raises(UserCodeError, match="GPT has no frozen blocks at its front"):
        model(tokens)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "replicate": {"layout": {"replicate": 2}},
    "microbatches": {"layout": {"replicate": 2}, "batch": {"micro_samples": 3}},
    "ZeRO-1": {"layout": {"shard": 2}, "memory": {"zero": 1}},
    "ZeRO-3": {"layout": {"shard": 2}},
}


def left_out(place: TestPlace, tables: Tables, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after twelve steps, and the share of samples in each whose frozen blocks were not computed."""
    run, shares = opened(place, tables, folder, Path(folder) / "unused"), []
    with closing(run.feed()) as feed:
        for _ in range(STEPS):
            fed = feed.next()
            run.state.progress.advance(fed.interval)
            run.step(run.state.progress.step, fed.microbatches, lr=LR)
            shares.append(run.tiers.take_figures().get("freeze/left_out", 0.0))
    return {n: t for n, t in whole_state(run).items() if n.startswith("model/")}, shares


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_cached_blocks_learns_as_without(ranks, tmp_path: Path, layout: str) -> None:
    """Over epochs of three steps, in which each rank gets other samples; all are found from the third epoch on."""
    corpus(tmp_path)
    small = {"kind": "gpt", "vocabulary": 61, "layers": 4, "width": 16, "heads": 2, "feed_forward_width": 24}
    tables = ADAM | {"model": small, "data": {"subset": 0.02}}
    half = {"layers": ["embedding", "blocks.0", "blocks.1"]}
    world = 1 if layout == "one rank" else 2
    plain = ranks(1, train, tables | {"freeze": half}, str(tmp_path))[0]
    kept = tables | {"freeze": half | {"cache": "1 MiB"}} | LAYOUTS[layout]
    found = ranks(world, left_out, kept, str(tmp_path))
    assert gap(found[0][0], plain.weights) < SUM_ORDER
    for _, shares in found:
        assert shares[:3] == [0.0] * 3
        assert shares[6:] == [1.0] * 6
