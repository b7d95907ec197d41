"""What blocks save, on the host and in 8 bits: gradients, memory and bytes, on models that are not our own too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoal.assembly.splitting import blocks_in, with_inner
from shoal.errors import UserCodeError
from shoal.memory.offloaded_activations import CODE_BLOCK, SavedTensors, decoded, encoded
from shoal.memory.recompute import blocks_of, recompute
from shoal.memory.simulated_device import SimulatedDevice
from shoal.memory.spill_file import Traffic
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.models.layers import set_sample_keys

CPU = torch.device("cpu")
BLOCKS = 4


def gpt() -> tuple[nn.Module, list[nn.Module], Callable[[], Tensor]]:
    model = build(GPTConfig(vocabulary=61, layers=BLOCKS, width=64, heads=4, dropout=0.1))
    initialise(model, seed=0, device="cpu", dtype=torch.float32)
    set_sample_keys(model.modules(), torch.arange(4))
    tokens = torch.randint(0, 61, (4, 96), generator=torch.Generator().manual_seed(0))
    return model, list(blocks_of(model).values()), lambda: model(tokens).logsumexp(-1).sum()


def encoder() -> tuple[nn.Module, list[nn.Module], Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True), BLOCKS)
    x = torch.randn(4, 96, 64)
    return model, list(model.layers.children()), lambda: model(x).square().sum()


def convolutions() -> tuple[nn.Module, list[nn.Module], Callable[[], Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x = torch.randn(4, 16, 24, 24).to(memory_format=torch.channels_last)
    return model, list(model.children()), lambda: model(x).square().sum()


MODELS = {"gpt": gpt, "encoder": encoder, "convolutions": convolutions}


def gradients_of(name: str, *, to_host: bool, bits: int | None = None, kind: str = "none") -> tuple[list[Tensor], dict]:
    model, blocks, loss = MODELS[name]()
    traffic, device = Traffic(), SimulatedDevice(None)
    if kind != "none":
        recompute(model, kind)  # pyright: ignore[reportArgumentType]
    if to_host or bits:
        SavedTensors(CPU, traffic, to_host=to_host, bits=bits).use_in(blocks)
    with device.counting():
        for _ in range(2):
            loss().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return found, {"peak": device.take_peak(), **traffic.take_figures()}


@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_are_the_same_to_the_bit_and_the_peak_is_lower(name: str) -> None:
    plain, at_once = gradients_of(name, to_host=False)
    moved, in_turn = gradients_of(name, to_host=True)
    assert all(map(torch.equal, plain, moved))
    assert in_turn["peak"] < 0.75 * at_once["peak"]
    assert in_turn["memory/to_device_bytes"] == in_turn["memory/to_host_bytes"] * (BLOCKS - 1) / BLOCKS


class Stage(nn.Module):
    """Blocks inside of a block, and something behind them, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
        self.out = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def test_blocks_inside_of_blocks_leave_one_after_the_other() -> None:
    """Two stages are as much as may be there at a time, and nothing would be gained; their six layers are not."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Stage() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    def found(inner: bool | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model, device, x = Net(), SimulatedDevice(None), torch.randn(4, 96, 64)
        blocks = blocks_in(model, None, 0)
        assert [type(block) for block in blocks] == [Stage, Stage]
        if inner is not None:
            SavedTensors(CPU, Traffic(), to_host=True).use_in(with_inner(blocks) if inner else blocks)
        with device.counting():
            for _ in range(2):
                model(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], device.take_peak()

    (plain, at_once), (outer, stages), (inner, layers) = found(None), found(False), found(True)
    assert all(map(torch.equal, plain, outer))
    assert all(map(torch.equal, plain, inner))
    assert layers < 0.75 * min(at_once, stages)


def test_under_recompute_the_inputs_of_blocks_move_alone() -> None:
    plain, _ = gradients_of("gpt", to_host=False)
    moved, figures = gradients_of("gpt", to_host=True, kind="full")
    assert all(map(torch.equal, plain, moved))
    assert figures["memory/to_host_bytes"] == 2 * BLOCKS * 4 * 96 * 64 * 4


@pytest.mark.parametrize("to_host", [False, True])
def test_in_8_bits_gradients_are_near(to_host: bool) -> None:
    plain, at_once = gradients_of("gpt", to_host=False)
    coded, in_turn = gradients_of("gpt", to_host=to_host, bits=8)
    assert in_turn["peak"] < 0.7 * at_once["peak"]
    for mine, exact in zip(coded, plain, strict=True):
        assert float((mine - exact).norm()) <= 0.02 * float(exact.norm()) + 1e-3
    assert not all(map(torch.equal, plain, coded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_code_is_off_by_no_more_than_it_says(dtype: torch.dtype) -> None:
    x = torch.randn(7, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.view(-1)[:CODE_BLOCK] = 0
    found = decoded(*encoded(x), torch.float32)
    largest = nn.functional.pad(x.float().view(-1), (0, -x.numel() % CODE_BLOCK)).view(-1, CODE_BLOCK).abs().amax(1)
    bound = largest.repeat_interleave(CODE_BLOCK)[: x.numel()].view(x.shape) / 254
    assert bool(((found - x.float()).abs() <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("hides", [-torch.inf, torch.finfo(torch.float32).min])
def test_what_a_mask_hides_stays_hidden_and_spoils_nothing(hides: float) -> None:
    """A bias with a mask added, as T5 and ModernBERT save it, rows that are hidden as a whole too."""
    bias = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2))
    hidden = torch.ones(4, 1000).triu(1).bool()
    hidden[2] = True
    found = decoded(*encoded(bias.masked_fill(hidden, hides)), torch.float32)
    assert bool((found[hidden] == hides).all())
    assert float((found - bias)[~hidden].abs().max()) <= float(bias.abs().max()) / 254 * (1 + 1e-5)


def test_large_numbers_of_float16_are_no_mask() -> None:
    """-40,000 is an activation; the lowest number is a mask, and so it is with a bias added."""
    x = torch.tensor([-40_000.0, -50_000.0, 300.0], dtype=torch.float16)
    assert float((decoded(*encoded(x), x.dtype) - x).abs().max()) <= 50_000 / 254 + 16  # and float16's own rounding
    masked = torch.tensor([-65_504.0, -65_472.0, 2.0, -1.0], dtype=torch.float16)
    found = decoded(*encoded(masked), masked.dtype)
    assert float(found[:2].max()) <= -65_472
    assert float((found - masked)[2:].abs().max()) <= 2 / 254


def test_infinity_spoils_nothing_either() -> None:
    """The others of its block stay what they are, and in other blocks the bound is that of all."""
    x = torch.randn(3 * CODE_BLOCK, generator=torch.Generator().manual_seed(3))
    x[0], x[5], x[7] = torch.inf, -torch.inf, 9.0
    found = decoded(*encoded(x), x.dtype)
    assert torch.equal(found.isinf(), x.isinf())
    assert (float(found[0]), float(found[5])) == (torch.inf, -torch.inf)
    seen = ~x.isinf()
    assert float((found - x)[seen].abs().max()) <= 9 / 252 * (1 + 1e-5)
    assert float((found - x)[CODE_BLOCK:].abs().max()) <= float(x[CODE_BLOCK:].abs().max()) / 254 * (1 + 1e-5)


def test_what_is_changed_in_place_after_it_was_saved_is_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).exp()
            return y.mul_(2.0)

    blocks = [InPlace(), InPlace()]
    SavedTensors(CPU, Traffic(), to_host=True).use_in(blocks)
    with pytest.raises(UserCodeError, match="in place"):
        blocks[1](blocks[0](torch.randn(256, 128)))


def test_a_graph_that_is_kept_gives_its_gradients_again() -> None:
    _, blocks, loss = gpt()
    SavedTensors(CPU, Traffic(), to_host=True).use_in(blocks)
    value, own = loss(), [p for block in blocks for p in block.parameters()]
    first = torch.autograd.grad(value, own, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(value, own)))
