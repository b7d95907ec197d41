"""Traces against closed forms, against PyTorch's own counter, and against what a real step allocates."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shoal.cost.transformer import Transformer, model_flops, total_parameters
from shoal.errors import UserCodeError
from shoal.memory.closed_form import Activations, block_saved_bytes
from shoal.memory.recompute import RecomputeKind, recompute
from shoal.memory.simulated_device import SimulatedDevice
from shoal.memory.tracker import allocated, measured_activation_bytes
from shoal.models.build import build
from shoal.models.config import ConvNetConfig, GPTConfig
from shoal.planner.trace.recorder import Filled
from shoal.planner.trace.subject import Subject, TracedSplit
from shoal.planner.trace.trace import Trace
from tests.planner.trace.models import CLASSES, LENGTH, WIDTH, Blocks, Looking, subject, vectors

GPT = GPTConfig(vocabulary=97, layers=3, width=64, heads=4, kv_heads=2, feed_forward_width=160)
TOKENS = 24
SCRATCH, CONVOLUTIONS = 0.03, 0.3
"""Shares of the peak that operators use inside of themselves: convolutions copy their arguments into columns. Those of
oneDNN, which are not looked at here, take 0.25 to 0.65, by the processor.
"""


def entropy(outputs: Tensor) -> Tensor:
    """A loss of logits."""
    return F.cross_entropy(outputs.flatten(0, -2), torch.zeros(outputs.shape[:-1].numel(), dtype=torch.int64))


def gpt(config: GPTConfig = GPT, *, length: int = TOKENS) -> Subject:
    """One of this project's own models, as if it were a user's, on sequences of `length` tokens."""
    return subject(lambda: build(config), lambda samples: torch.zeros(samples, length, dtype=torch.int64), entropy)


def sizes_of(config: GPTConfig) -> Transformer:
    """What the closed forms know of it."""
    return Transformer(
        layers=config.layers, hidden=config.width, heads=config.heads, kv_heads=config.key_value_heads,
        head_size=config.width // config.heads, feed_forward=config.hidden_width, vocabulary=config.vocabulary,
        gated=True, tied=config.tied,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_arithmetic_of_a_gpt_are_the_closed_forms(tied: bool) -> None:
    """Exactly: causal attention as half, backward twice the forward, a tied embedding once."""
    config = GPTConfig(vocabulary=97, layers=3, width=64, heads=4, kv_heads=2, feed_forward_width=160, tied=tied)
    trace = gpt(config).of(TracedSplit(2))
    model = sizes_of(config)
    assert sum(one.numel for one in trace.parameters.values()) == total_parameters(model)
    assert trace.flops == model_flops(model, 2, TOKENS)


def test_what_a_block_of_a_gpt_keeps_is_the_closed_form() -> None:
    """Exactly, to the byte."""
    trace = gpt().of(TracedSplit(2))
    expected = block_saved_bytes(GPT, Activations(tokens=2 * TOKENS, element_bytes=4), kind="none")
    assert {trace.kept_bytes[block] for block in trace.units.blocks} == {expected}


def test_recomputed_blocks_keep_their_inputs_and_run_again() -> None:
    """What is computed again is the forward of the blocks, and no more arithmetic counts as the model's."""
    plain, again = gpt().of(TracedSplit(2)), gpt().of(TracedSplit(2, recompute="full"))
    stream = 2 * TOKENS * GPT.width * 4
    assert {again.kept_bytes[block] for block in again.units.blocks} == {stream}
    assert again.flops == plain.flops
    forward = sum(one.flops for one in plain.operators if one.phase == "forward" and one.unit in plain.units.blocks)
    repeated = sum(one.flops for one in again.operators if one.phase == "recompute")
    last = GPT.layers * 2 * 2 * TOKENS * GPT.width * GPT.hidden_width  # nothing saved behind it: it stops before
    assert repeated == forward - last
    assert again.peak_bytes < plain.peak_bytes


def test_blocks_that_are_alike_have_traces_that_are_alike() -> None:
    """Each operator of forward and backward finds its block."""
    trace = subject(Blocks).of(TracedSplit(2))
    lists = [work(trace, block) for block in trace.units.blocks]
    assert len(lists[0]) > 40
    assert lists[1] == lists[2]
    # The input of the first block needs no gradient, which is a sum of two.
    assert len(lists[1]) - len(lists[0]) == 1


def test_products_belong_to_their_layers() -> None:
    """Of each linear layer one product forward and two backward, which are found by autograd's numbers."""
    trace = subject(Blocks).of(TracedSplit(2))
    for layer in ("mixed", "back", "up", "down"):
        own = [one for one in trace.operators if one.module == f"blocks.1.{layer}" and one.products]
        assert [one.phase for one in own] == ["forward", "backward", "backward"]
        assert {product.gives for one in own for product in one.products} == {"output", "input", "weight"}
        assert len({one.flops for one in own}) == 1


def work(trace: Trace, unit: int) -> list[tuple[str, str, float]]:
    """What a unit does, in order."""
    return [(one.phase, one.name, one.flops) for one in trace.operators if one.unit == unit]


@pytest.mark.parametrize("name", ["blocks", "convnet"])
def test_arithmetic_is_what_pytorch_counts_in_a_real_step(name: str) -> None:
    """Products and convolutions, forward and backward; fused attention on a CPU is counted by nobody else."""
    made, inputs = cases()[name]
    counter = FlopCounterMode(display=False)
    model, x = made(), inputs(2)
    with counter:
        model(x).square().sum().backward()
    trace = subject(made, inputs).of(TracedSplit(2))
    assert sum(p.matmul.flops for one in trace.operators for p in one.products) == counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scratch"), [("blocks", SCRATCH), ("convnet", CONVOLUTIONS)])
def test_bytes_are_those_of_a_real_step(name: str, scratch: float) -> None:
    """Kept for the backward but for the loss's own; at the peak all but scratch memory inside of operators."""
    made, inputs = cases()[name]
    model, x = made(), inputs(8)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trace = subject(made, inputs).of(TracedSplit(8))
    apart = 8 * CLASSES * (LENGTH if name == "blocks" else 1) * 4
    assert trace.held_bytes == pytest.approx(held_really(model, x), abs=2 * apart)
    with torch.backends.mkldnn.flags(enabled=False):
        peak = allocated(lambda: model(x).square().sum().backward()).peak_bytes
    assert (1 - scratch) * peak <= trace.peak_bytes <= peak


def held_really(model: nn.Module, x: Tensor) -> int:
    """Storages that a real forward leaves, the input aside."""
    return measured_activation_bytes(lambda: model(x).square().sum())


def cases() -> dict[str, tuple]:  # type: ignore[type-arg]
    """Models and inputs."""

    def convnet() -> nn.Module:
        with torch.device("cpu"):
            return build(ConvNetConfig(width=16))

    return {"blocks": (Blocks, vectors), "convnet": (convnet, lambda samples: torch.randn(samples, 1, 8, 8))}


def test_tensor_ranks_share_the_arithmetic_and_sum_the_stream() -> None:
    """Two sums of the stream forward and two backward in each block, half of the block's products on each rank."""
    whole, half = gpt().of(TracedSplit(2)), gpt().of(TracedSplit(2, tensor=2))
    for block in whole.units.blocks:
        assert sum(f for *_, f in work(half, block)) == sum(f for *_, f in work(whole, block)) / 2
        sums = [message for message in half.messages if message.unit == block]
        assert [message.kind for message in sums] == ["all_reduce"] * 4
        assert {message.size for message in sums} == {2 * TOKENS * GPT.width * 4}
        assert sum(message.phase == "forward" for message in sums) == 2


def test_a_model_that_looks_at_numbers_is_refused_by_its_line() -> None:
    """The sentence has the file, the line and what to do instead."""
    with pytest.raises(UserCodeError, match=r"models.py, line \d+ \(.*item\(\).*torch.where"):
        subject(Looking).of(TracedSplit(2))


def test_a_model_that_raises_is_refused_by_its_line() -> None:
    """Its own words are in the sentence."""
    with pytest.raises(UserCodeError, match=r"models.py, line \d+ .*normalized_shape"):
        subject(Blocks, lambda samples: torch.randn(samples, LENGTH, WIDTH + 1)[..., :-1].flatten(1)).of(TracedSplit(2))


def test_a_builder_may_look_at_numbers() -> None:
    """Rates that grow with depth are read from a tensor; what is traced has no storage all the same."""

    def made() -> nn.Module:
        rates = torch.linspace(0, 0.1, 2).tolist()
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(rates[1]))
        model.scale = torch.ones(WIDTH)  # type: ignore[assignment]
        return model

    found = subject(made)
    assert found.of(TracedSplit(3)).flops == 2 * 2 * 3 * LENGTH * WIDTH * WIDTH
    assert type(found.model.scale).__name__ == "FakeTensor"


def test_seven_billion_parameters_take_no_memory() -> None:
    """Sizes alone: the model would be 27 GB, and nothing of it is there."""
    config = GPTConfig(vocabulary=32000, layers=2, width=16384, heads=128, feed_forward_width=65536)
    trace = gpt(config, length=2048).of(TracedSplit(1))
    assert sum(one.numel for one in trace.parameters.values()) > 7e9


class Tries(Blocks):
    """Tries a product that does not fit, and goes without."""

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            torch.mm(x.flatten(0, 1), torch.zeros(WIDTH + 1, 2))
        return super().forward(x)


def test_an_operator_that_is_tried_in_vain_is_not_told_of() -> None:
    """PyTorch logs a traceback of its fake tensors, while nobody traces; the trace is whole without it."""
    log, told = logging.getLogger("torch._subclasses.fake_tensor"), logging.handlers.BufferingHandler(100)
    log.addHandler(told)
    try:
        tried, plain = (subject(model, vectors).of(TracedSplit(2)) for model in (Tries, Blocks))
        assert tried.flops == plain.flops
        assert told.buffer == []
        with FakeTensorMode(allow_non_fake_inputs=True):
            Tries()(torch.zeros(1, LENGTH, WIDTH))
        assert len(told.buffer) == 1
    finally:
        log.removeHandler(told)


@pytest.mark.slow
@pytest.mark.parametrize("again", ["none", "full"])
def test_a_backward_onto_no_gradients_makes_them(again: RecomputeKind) -> None:
    """At its peak, and of activations, there is what a device counts of the real one; blocks are computed again."""
    model, x, device = Blocks(), vectors(8), SimulatedDevice(None)
    recompute(model, again)
    device.hold([*model.parameters(), x])
    at_rest = device.live_bytes
    with device.counting():
        model(x).square().sum().backward()
    assert subject(Blocks).of(TracedSplit(8, recompute=again)).first_peak_bytes == device.take_peak() - at_rest


def test_lent_buffers_stay_until_others_have_left() -> None:
    """Beside what lives: three gradients of 10, 20 and 40 bytes, in as many buckets, or in one."""
    steps = [Filled("a", 10, 100, 90), Filled("b", 20, 80, 70), Filled("c", 40, 60, 50)]
    trace = replace(subject(Blocks).of(TracedSplit(1)), filled=tuple(steps), since_bytes=45)
    assert trace.first_peak_bytes == max(100, 80 + 10, 60 + 30, 45 + 70)
    apart = [["a"], ["b"], ["c"]]
    assert trace.lent_peak_bytes(apart, in_flight=2) == max(100, 90 + 10, 70 + 30, 50 + 70, 45 + 60)
    assert trace.lent_peak_bytes(apart, in_flight=1) == max(100, 90 + 10, 70 + 30, 50 + 60, 45 + 40)
    assert trace.lent_peak_bytes([["c", "b", "a"]], in_flight=2) == 90 + 70


class Again(nn.Module):
    """One layer, twice, and a leaf of the model's own, under the reentrant checkpoint: each pass adds to gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, own = self.layer(x), torch.zeros(WIDTH, requires_grad=True)
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.layer(x) + own), x, use_reentrant=True)
        return self.head(x)


def test_gradients_to_which_a_backward_adds_twice_are_there_once() -> None:
    """As a device counts them; a bucket leaves behind the last term, and leaves of the model's own are in none."""
    model, x, device = Again(), vectors(8), SimulatedDevice(None)
    device.hold([*model.parameters(), x])
    at_rest = device.live_bytes
    with device.counting():
        model(x).square().sum().backward()
    trace = subject(Again).of(TracedSplit(8))
    assert [one.name for one in trace.filled].count("layer.weight") == 3
    assert trace.first_peak_bytes == device.take_peak() - at_rest
    twice = [Filled("a", 10, 50, 40), Filled("b", 20, 45, 60), Filled("a", 10, 60, 50)]
    trace = replace(trace, filled=tuple(twice), since_bytes=65)
    assert trace.first_peak_bytes == max(50, 45 + 10, 60 + 30, 65 + 30)
    assert trace.lent_peak_bytes([["a"], ["b"]], in_flight=0) == max(50, 40 + 10, 45 + 10, 60 + 30, 50 + 30, 65)


class Grouped(nn.Module):
    """Experts in one parameter, which compute even groups of rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.experts = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(4, WIDTH, 48))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        rows = (x * self.scale).flatten(0, 1).to(self.dtype)
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(rows) // 4)
        return F.grouped_mm(rows, self.experts.to(self.dtype), offs=ends).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_one_product_count_as_all_rows_times_one_of_them(dtype: torch.dtype) -> None:
    """In the forward, and for both gradients; in types of which PyTorch tells no shapes, too."""
    trace = subject(lambda: Grouped(dtype)).of(TracedSplit(2))
    found = {(one.phase, product.gives): product.matmul.flops for one in trace.operators for product in one.products}
    every = 2 * (2 * LENGTH) * WIDTH * 48
    assert found == {("forward", "output"): every, ("backward", "input"): every, ("backward", "weight"): every}
