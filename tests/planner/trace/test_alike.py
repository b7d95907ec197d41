"""Blocks that are alike are traced once, and the trace is the one of every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.memory.recompute import RecomputeKind
from shoal.planner.trace.alike import _Likeness
from shoal.planner.trace.subject import Subject, TracedSplit
from shoal.planner.trace.trace import Trace
from tests.planner.trace.models import WIDTH, Blocks, Normed, Residual, subject

DEPTH = 4


def calls_and_traces(model: Subject, split: TracedSplit) -> tuple[int, Trace, Trace]:
    """How often a block ran in the forward where alike ones are traced once, that trace, and that of every block."""
    calls = list[int]()
    count = nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: calls.append(1) if module.__class__ is nn.GELU else None
    )
    try:
        alike = model.of(split)
    finally:
        count.remove()
    return len(calls), alike, replace(model, each=True, _traces={}).of(split)


def same(alike: Trace, each: Trace) -> None:
    """All that plans read."""
    assert alike.operators == each.operators
    assert alike.messages == each.messages
    assert alike.parameters == each.parameters
    assert alike.kept_bytes == each.kept_bytes
    assert alike.boundary_bytes == each.boundary_bytes
    assert alike.filled == each.filled
    assert (alike.peak_bytes, alike.since_bytes) == (each.peak_bytes, each.since_bytes)
    for block in each.units.blocks:
        assert alike.on_the_way_bytes[block] == each.on_the_way_bytes[block]


class Gelu(Residual):
    """A block whose forwards can be counted."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.GELU()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found = super().forward(x)
        return found + self.act(x) if mask is None else found + self.act(x) * mask


class Deep(Blocks):
    """Every third block gets a mask; the block at `odd` is narrower inside."""

    def __init__(self, depth: int = DEPTH, *, masked: bool = False, odd: int | None = None) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Gelu(WIDTH) for _ in range(depth))
        self.masked = masked
        if odd is not None:
            self.blocks[odd].up, self.blocks[odd].down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        for place, block in enumerate(self.blocks):
            x = block(x, mask if self.masked and place % 3 == 2 else None)
        return self.head(x)


class Collected(Deep):
    """The blocks leave what they computed behind, and the loss is of that."""

    def forward(self, x: Tensor) -> Tensor:
        left = list[Any]()
        acts = [block.get_submodule("act") for block in self.blocks]
        handles = [act.register_forward_hook(lambda module, inputs, out: left.append(out)) for act in acts]
        found = super().forward(x)
        for handle in handles:
            handle.remove()
        return found + sum(one.sum() for one in left)


class Summed(Deep):
    """The last block gets the gradient of a sum, which is one number in the place of many."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Numbered(Gelu):
    """A block with its number."""

    def __init__(self, number: int) -> None:
        super().__init__(WIDTH)
        self.layer_idx = number
        self.kinds = ["whole", "sliding"] * DEPTH


class ByRemainder(Numbered):
    """Every second block does more."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        found = super().forward(x)
        return found.relu() if self.layer_idx % 2 else found


class ByList(Numbered):
    """As a list of the configuration says."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        found = super().forward(x)
        return found.relu() if self.kinds[self.layer_idx] == "sliding" else found


class HandsOn(Numbered):
    """Gives its number to what does not look at it."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return super().forward(x) if self.layer_idx is not None else x


class Counts(Numbered):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Writes(Numbered):
    """Into its input."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return super().forward(x.mul_(2))


class Shares(Numbered):
    """The first block to be called computes what all others add."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        if "shared" in mask:
            return super().forward(x) + mask["shared"]
        mask["shared"] = self.act(x)
        return super().forward(x)


class Numbers(Deep):
    """Blocks of one class, called so many times; `tied`: the first two have a layer in common."""

    def __init__(self, kind: type[Numbered], *, times: int = 1, tied: bool = False) -> None:
        super().__init__(0)
        self.blocks, self.times = nn.ModuleList(kind(number) for number in range(DEPTH)), times
        if tied:
            self.blocks[1].up = self.blocks[0].up

    def forward(self, x: Tensor) -> Tensor:
        shared = dict[str, Tensor]()
        for block in [*self.blocks] * self.times:
            x = block(x, shared)
        return self.head(x)


@pytest.mark.parametrize(
    ("build", "ran"),
    [
        (lambda: Numbers(HandsOn), 2),
        (lambda: Numbers(ByList), 1 + DEPTH),  # tried in vain
        (lambda: Numbers(HandsOn, times=2), 2 + 2 * DEPTH),
        (lambda: Numbers(HandsOn, tied=True), 3),
        *(
            pytest.param(partial(Numbers, kind), 1 + DEPTH, marks=pytest.mark.slow)
            for kind in (ByRemainder, Counts, Writes)
        ),
        pytest.param(lambda: Numbers(Shares), 3 + DEPTH, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_decide_by_their_number_or_by_what_others_did_are_each_traced(
    build: Callable[[], nn.Module], ran: int
) -> None:
    """And those whose gradients are summed over several places; a number that is only handed on does no harm."""
    calls, alike, each = calls_and_traces(subject(build), TracedSplit(3))
    same(alike, each)
    assert calls == ran


@pytest.mark.parametrize(
    "again", ["none", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("full", "operators"))]
)
@pytest.mark.parametrize(
    ("build", "ran"),
    [
        (Deep, 2),  # the input of the first one needs no gradient
        (lambda: Deep(masked=True), 3),
        (lambda: Deep(odd=2), 3),
        pytest.param(Collected, 1 + DEPTH, marks=pytest.mark.slow),  # tried in vain
        pytest.param(Summed, 2 + DEPTH, marks=pytest.mark.slow),
    ],
    ids=["alike", "two kinds of calls", "one is other", "tensors are left behind", "gradients are other"],
)
def test_alike_blocks_run_once_and_the_trace_is_that_of_each(
    build: Callable[[], nn.Module], ran: int, again: RecomputeKind
) -> None:
    """Operators, messages, gradients in their order, and every byte that lives."""
    calls, alike, each = calls_and_traces(subject(build), TracedSplit(3, recompute=again))
    assert calls == ran or again != "none"  # recomputed blocks stop early
    same(alike, each)


class Lowered(Deep):
    """Under autocast, which keeps the weights that it has cast until its context ends."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).square().sum()


@pytest.mark.parametrize("again", ["none", "full"])
def test_weights_that_autocast_has_cast_live_until_the_forward_ends(again: RecomputeKind) -> None:
    """Those of blocks before the first rehearsal, too."""
    model = subject(lambda: Lowered(odd=0))
    same(*calls_and_traces(model, TracedSplit(3, recompute=again))[1:])


def test_statistics_of_batches_are_written_down_for_each_block() -> None:
    """Convolutions."""
    model = subject(Normed, lambda samples: torch.randn(samples, 1, 8, 8))
    same(*calls_and_traces(model, TracedSplit(2, recompute="full"))[1:])


ARCHITECTURES = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 4, "n_head": 2},
    "BertForMaskedLM": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64},
    "Gemma3ForCausalLM": {
        "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "intermediate_size": 64, "sliding_window": 4, "sliding_window_pattern": 3,
    },
}  # fmt: skip
"""Dropout, and sliding windows beside whole ones."""


def logits(outputs: Any) -> Tensor:
    """Their sum."""
    return outputs.logits.sum()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("again", ["none", "full"])
def test_models_of_transformers_have_the_traces_of_each_block(architecture: str, again: RecomputeKind) -> None:
    """The same operators, gradients and bytes."""
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, architecture)
    config = made.config_class(vocab_size=64, use_cache=False, **ARCHITECTURES[architecture])

    def tokens(samples: int) -> Tensor:
        return torch.zeros(samples, 16, dtype=torch.int64)

    model = subject(lambda: made(config).train(), tokens, logits)
    _, alike, each = calls_and_traces(model, TracedSplit(3, recompute=again))
    same(alike, each)


def test_hooks_of_one_code_are_alike_by_what_they_hold() -> None:
    """In a closure, or as a default."""

    def hooked(scale: float, shift: float) -> nn.Module:
        def hook(module: nn.Module, args: object, output: Tensor, *, shift: float = shift) -> Tensor:
            return output * scale + shift

        layer = nn.Linear(2, 2)
        layer.register_forward_hook(hook)
        return layer

    first, same, scaled, shifted = (_Likeness(hooked(*given)).key for given in ((1, 2), (1, 2), (3, 2), (1, 3)))
    assert first == same
    assert first != scaled
    assert first != shifted
