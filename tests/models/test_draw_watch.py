"""The mode that keys draws is left out while nothing is drawn, and the numbers are those that it would have given."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from shoal.engine.batch_statistics import StepBuffers
from shoal.engine.randomness import Randomness
from shoal.models import draw_watch
from shoal.models.batch_norm import GroupedBatchNorm
from shoal.models.draw_watch import draws_nothing, generators_in_use, key_checkpoints, seed_all_devices
from shoal.models.keyed_draws import KeyedDraws, active_draws
from shoal.own_loop.steps import DrawsBySample

STEPS = 5


class Sleeper(nn.Module):
    """Draws from its forward `wakes` on: dropout in a module, dropout of its own, and what nobody can key. It `drops`:
    the module does so all along.
    """

    def __init__(self, wakes: int, *, drops: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drops = drops
        self.inner: nn.Module = nn.Linear(6, 6)
        self.inside = nn.Dropout(0.0)
        self.wakes, self.calls = wakes, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        draws = self.calls >= self.wakes
        self.seen += 1
        self.inside.p = 0.5 if draws or self.drops else 0.0
        x = self.inside(self.inner(x))
        if not draws:
            return x
        return F.dropout(x, 0.5, self.training) * torch.randperm(6)


def randomness_of(model: nn.Module, *, may_sleep: bool) -> Randomness:
    return Randomness(model, seed=5, replica=0, draws=KeyedDraws(model, seed=5), may_sleep=may_sleep)


def trained(
    wakes: int, *, may_sleep: bool, repeatable: bool = True, drops: bool = False
) -> tuple[list[Tensor], Sleeper, Randomness]:
    """The outputs of some steps, each of one microbatch, as `shoal train` computes them."""
    model = Sleeper(wakes, drops=drops)
    randomness, buffers = randomness_of(model, may_sleep=may_sleep), StepBuffers(model)
    found = []
    for step in range(STEPS):
        model.calls = step
        randomness.step(step)
        buffers.start()
        buffers.rewind()
        randomness.microbatch(torch.tensor([4 * step, 4 * step + 1]))
        found.append(
            randomness.forward(
                lambda: model(torch.ones(2, 6)), take_back=buffers.take_back, repeatable=lambda: repeatable
            )
        )
        buffers.finish(committed=True)
    return found, model, randomness


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("wakes", [0, 1, 3, STEPS])
def test_outputs_and_buffers_are_those_of_the_mode(wakes: int, drops: bool) -> None:
    """Whenever it begins to draw: the forward that was taken back is computed as if it were the first."""
    expected, model, _ = trained(wakes, may_sleep=False, drops=drops)
    found, other, randomness = trained(wakes, may_sleep=True, drops=drops)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    assert float(model.seen) == float(other.seen) == STEPS  # type: ignore[arg-type]
    assert randomness.draws is not None
    assert randomness.draws.asleep is (wakes == STEPS and not drops)
    assert randomness.draws.dozes is (wakes == STEPS and drops)
    assert bool(other._forward_hooks) is (wakes < STEPS)


def moved(wakes: int, *, may_sleep: bool, writes: bool = False) -> tuple[list[Tensor], Sleeper, Randomness]:
    """The same in a script's own loop, whose model has batch norms of PyTorch's and over groups. It `writes` a buffer
    itself, before it calls the model.
    """
    model = Sleeper(wakes)
    model.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), GroupedBatchNorm(6, 2))
    randomness, buffers = randomness_of(model, may_sleep=may_sleep), StepBuffers(model)
    compute: Any = SimpleNamespace(randomness=randomness, buffers=buffers)
    hooks, found, x = DrawsBySample([model], compute, inside=lambda: True), [], torch.arange(24.0).view(4, 6)
    for step in range(STEPS):
        model.calls = step
        randomness.step(step)
        buffers.start()
        buffers.rewind()
        randomness.microbatch(torch.arange(4 * step, 4 * step + 4))
        if writes:
            model.seen += 1
        found.append(model(x**step))
        buffers.finish(committed=True)
    hooks.close()
    return found, model, randomness


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("wakes", [0, 1, 3, STEPS])
def test_a_loop_whose_buffers_move_has_outputs_and_buffers_of_the_mode(wakes: int, writes: bool) -> None:
    """Statistics of batch norms and the sums of a step; and where the loop writes a buffer itself the mode stays, as
    what the forward began with is known no more.
    """
    expected, model, _ = moved(wakes, may_sleep=False, writes=writes)
    found, other, randomness = moved(wakes, may_sleep=True, writes=writes)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    for (name, one), two in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two), name
    assert float(other.seen) == STEPS * (1 + writes)  # type: ignore[arg-type]
    assert randomness.draws is not None
    assert randomness.draws.asleep is (wakes == STEPS and not writes)


def test_a_forward_that_meets_other_ranks_is_under_the_mode() -> None:
    _, _, randomness = trained(STEPS, may_sleep=True, repeatable=False)
    assert randomness.draws is not None
    assert not randomness.draws.asleep


def test_who_asks_for_the_mode_keeps_it() -> None:
    """Such as what repeats a part of the forward, and has to know where in it that stands."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    model[0].register_forward_hook(lambda *_: active_draws() and None)
    randomness = randomness_of(model, may_sleep=True)
    for step in range(2):
        randomness.microbatch(torch.tensor([step]))
        randomness.forward(lambda: model(torch.ones(1, 6)), take_back=lambda: None, repeatable=lambda: True)
    assert randomness.draws is not None
    assert not randomness.draws.dozes


def looped(wakes: int, *, may_sleep: bool, calls: int = 1, drops: bool = False) -> tuple[list[Tensor], Randomness]:
    """The same in a script's own loop, which calls the model by itself, so many times a microbatch."""
    model = Sleeper(wakes, drops=drops)
    del model._buffers["seen"]
    model.seen = torch.zeros(())  # type: ignore[assignment]
    randomness = randomness_of(model, may_sleep=may_sleep)
    compute: Any = SimpleNamespace(randomness=randomness, buffers=StepBuffers(model))
    hooks = DrawsBySample([model], compute, inside=lambda: True)
    found = []
    for step in range(STEPS):
        model.calls = step
        randomness.step(step)
        compute.buffers.start()
        randomness.microbatch(torch.tensor([4 * step, 4 * step + 1]))
        found += [model(torch.ones(2, 6)) for _ in range(calls)]
    hooks.close()
    return found, randomness


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("wakes", [0, 1, 3, STEPS])
def test_a_loop_of_a_script_draws_the_same(wakes: int, calls: int, drops: bool) -> None:
    expected, _ = looped(wakes, may_sleep=False, calls=calls, drops=drops)
    found, randomness = looped(wakes, may_sleep=True, calls=calls, drops=drops)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))
    assert randomness.draws is not None
    assert randomness.draws.asleep is (wakes == STEPS and calls == 1 and not drops)
    assert randomness.draws.dozes is (wakes == STEPS and calls == 1 and drops)


class Coins(nn.Module):
    """Flips coins of Python's and NumPy's from its forward `flips` on, and draws what nobody keys from `wakes` on."""

    def __init__(self, flips: int, wakes: int) -> None:
        super().__init__()
        self.flips, self.wakes, self.calls = flips, wakes, 0

    def forward(self, x: Tensor) -> Tensor:
        coin = random.random() + np.random.rand() if self.calls >= self.flips else 0.0
        return x + coin + (torch.randperm(6) if self.calls >= self.wakes else 0)


def flipped(model: Coins, *, may_sleep: bool, own_loop: bool) -> list[Tensor]:
    """The outputs of some steps, and what the loop draws behind each."""
    randomness, found = randomness_of(model, may_sleep=may_sleep), []
    randomness.seeds_host = True
    compute: Any = SimpleNamespace(randomness=randomness, buffers=StepBuffers(model))
    hooks = DrawsBySample([model] if own_loop else [], compute, inside=lambda: True)
    for step in range(STEPS):
        model.calls = step
        randomness.step(step)
        randomness.microbatch(torch.tensor([step]))
        if own_loop:
            lam = random.random() if model.flips == 0 else 1.0
            found.append(model(lam * torch.ones(1, 6)))
        else:
            forward = partial(model, torch.ones(1, 6))
            found.append(randomness.forward(forward, take_back=lambda: None, repeatable=lambda: True))
        found.append(torch.tensor([random.random(), np.random.rand()]))
    hooks.close()
    return found


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("flips", [0, 1, 2])
def test_a_repeated_forward_flips_the_same_coins(flips: int, own_loop: bool) -> None:
    """As a layer that is left out by chance: whenever it begins, and whatever the loop has drawn before."""
    expected = flipped(Coins(flips, 2), may_sleep=False, own_loop=own_loop)
    found = flipped(Coins(flips, 2), may_sleep=True, own_loop=own_loop)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_what_the_model_itself_drops_is_keyed_in_a_loop() -> None:
    """Dropout called in the forward of the outermost module: the same for a sample in any batch."""
    outputs = []
    for samples in ([3, 4], [4, 3]):
        model = nn.Sequential()
        model.forward = lambda x: F.dropout(x, 0.5)  # type: ignore[method-assign]
        randomness = randomness_of(model, may_sleep=True)
        compute: Any = SimpleNamespace(randomness=randomness, buffers=StepBuffers(model))
        DrawsBySample([model], compute, inside=lambda: True)
        randomness.step(1)
        randomness.microbatch(torch.tensor(samples))
        outputs.append(model(torch.ones(2, 64)))
    assert torch.equal(outputs[0], outputs[1].flip(0))


def test_generators_are_those_of_whatever_accelerator_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device that this process uses, once it uses one; all of them are seeded where there are several."""
    own, seeds = torch.Generator(), []
    module = SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 1, default_generators=[None, own],
        manual_seed_all=seeds.append,
    )  # fmt: skip
    monkeypatch.setattr(draw_watch, "_accelerator", lambda: torch.device("xpu"))
    asked: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: asked.append(2) or 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert generators_in_use() == [torch.default_generator, own]
    seed_all_devices(7)
    module.is_initialized = lambda: False
    assert generators_in_use() == [torch.default_generator]
    seed_all_devices(8)
    assert seeds == [7]
    assert len(asked) == 1  # it is a look at the driver: none where no device is in use


def drawing_loop(samples: list[int], model: nn.Module) -> tuple[DrawsBySample, Randomness]:
    """A loop around `model`, before a microbatch of the samples at these positions."""
    torch.manual_seed(len(samples))
    nothing, randomness = draws_nothing(model), randomness_of(model, may_sleep=True)
    if nothing and randomness.draws is not None:
        randomness.draws.sleep()
    compute: Any = SimpleNamespace(randomness=randomness, buffers=StepBuffers(model))
    draws = DrawsBySample([model], compute, inside=lambda: True)
    randomness.step(1)
    randomness.microbatch(torch.tensor(samples))
    return draws, randomness


def drawn_past_the_forward(samples: list[int], model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """What a loop draws for samples, and for all of them: between two forwards, and behind the last backward."""
    draws, randomness = drawing_loop(samples, model)
    with draws.loop():
        x = torch.ones(len(samples), 6)
        noise = torch.randn_like(x)
        model(x)
        times, dropped = torch.randint(0, 1000, (len(samples),)), model.get_submodule("0")(x)
        level, order = torch.rand(()), torch.randperm(7)
        layer, blend = nn.Linear(5, 3), torch.distributions.Gamma(torch.ones(7), 1.0).sample()
        with randomness.beside_loop():
            torch.rand(3)
        randomness.end_samples()
        weights = torch.randn(4, 3)
    assert not _get_current_function_mode_stack()
    assert not randomness.unkeyed(torch.device("cpu"))
    return [noise, times, dropped], [level, order, layer.weight.detach(), layer.bias.detach(), blend, weights]


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.ReLU()], ids=["draws", "draws nothing"])
def test_what_a_loop_draws_past_the_forward_is_keyed(layer: nn.Module) -> None:
    """On the samples where it has a row for each, whatever the model does; else the same beside any of them."""
    model = nn.Sequential(layer)
    own, of_all = drawn_past_the_forward([0, 1, 2, 3], model)
    for part in ([0, 1], [2, 3], [3, 1, 0]):
        own_part, of_all_part = drawn_past_the_forward(part, model)
        assert all(torch.allclose(whole[part], each) for whole, each in zip(own, own_part, strict=True))
        assert all(map(torch.equal, of_all, of_all_part))
    assert not torch.equal(own[0][0], own[0][1])


def test_a_checkpointed_part_that_a_loop_calls_repeats_its_draws() -> None:
    """Its gradient is that of the mask of its forward."""
    draws, randomness = drawing_loop([0, 1], model := nn.Sequential(nn.Dropout(0.5)))
    key_checkpoints()
    x = torch.ones(2, 64, requires_grad=True)
    with draws.loop():
        torch.rand(())
        out = checkpoint(lambda x: model.get_submodule("0")(F.dropout(x, 0.3)), x, use_reentrant=False)
        torch.rand(())
        with randomness.beside_loop(), randomness.drawing():
            out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


@contextmanager
def default_device() -> Iterator[None]:
    """PyTorch keeps it below all other modes."""
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.ReLU()], ids=["draws", "draws nothing"])
@pytest.mark.parametrize(
    "other", [BaseTorchFunctionMode, partial(torch.device, "cpu"), default_device], ids=["mode", "device", "default"]
)
def test_other_modes_around_forwards_of_a_loop_end_as_they_began(other: Any, layer: nn.Module) -> None:
    """What is entered last is left first, though the model is called outside of the loop's own draws."""
    draws, _ = drawing_loop([0, 1], model := nn.Sequential(layer))
    with draws.loop():
        with other():
            model(torch.ones(2, 6))
            with BaseTorchFunctionMode():
                model(torch.ones(2, 6))
        assert len(_get_current_function_mode_stack()) == 1
        own = torch.randn(2, 6)
    assert not _get_current_function_mode_stack()
    assert torch.equal(own, loop_draw())


def loop_draw() -> Tensor:
    """The first that a loop draws for samples 0 and 1."""
    draws, _ = drawing_loop([0, 1], nn.Sequential())
    with draws.loop():
        return torch.randn(2, 6)


def test_a_loop_may_be_given_a_microbatch_inside_of_a_mode_that_ends_in_it() -> None:
    draws, _ = drawing_loop([0, 1], nn.Sequential())
    with BaseTorchFunctionMode():
        draws.enter_loop()
    own = torch.randn(2, 6)
    draws.leave_loop()
    assert torch.equal(own, loop_draw())
    assert not _get_current_function_mode_stack()


def test_a_model_that_another_thread_calls_leaves_the_loop_as_it_was() -> None:
    """Its own draws are keyed there, too, as long as the loop waits."""
    draws, _ = drawing_loop([0, 1], model := nn.Sequential(nn.Dropout(0.5)))
    with draws.loop(), ThreadPoolExecutor(1) as pool:
        found = pool.submit(model, torch.ones(2, 64)).result()
        own = torch.randn(2, 6)
    assert torch.equal(own, loop_draw())
    assert not _get_current_function_mode_stack()
    again, _ = drawing_loop([0, 1], model := nn.Sequential(nn.Dropout(0.5)))
    with again.loop():
        assert torch.equal(model(torch.ones(2, 64)), found)


def test_a_copy_of_the_model_draws_as_the_loop_does() -> None:
    """A teacher, say, which is made in the middle of a step."""
    draws, _ = drawing_loop([0, 1], model := nn.Sequential(nn.Dropout(0.5)))
    with draws.loop():
        teacher = copy.deepcopy(model)
        found = teacher(torch.ones(2, 64))
        assert not torch.equal(found, teacher(torch.ones(2, 64)))
    assert not _get_current_function_mode_stack()
    draws, _ = drawing_loop([0, 1], nn.Sequential())
    with draws.loop():
        assert torch.equal(F.dropout(torch.ones(2, 64), 0.5), found)


def test_a_loop_that_trains_in_evaluation_mode_has_its_draws_keyed() -> None:
    draws, _ = drawing_loop([0, 1], nn.Sequential().eval())
    with draws.loop():
        own = torch.randn(2, 6)
    assert torch.equal(own, loop_draw())


class Drawn(torch.utils.data.Dataset[Tensor]):
    """Four samples, each drawn where it is read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(8)


def test_workers_of_a_loader_that_a_loop_starts_draw_for_themselves() -> None:
    """As two of PyTorch's do: no sample like another."""
    draws, _ = drawing_loop([0, 1], nn.Sequential())
    with draws.loop():
        loader = torch.utils.data.DataLoader(Drawn(), num_workers=2, multiprocessing_context="fork")
        found = torch.cat(list(loader))
    assert len(found.unique(dim=0)) == len(found)


def test_a_loop_that_is_left_inside_of_another_mode_leaves_that_one() -> None:
    draws, _ = drawing_loop([0, 1], nn.Sequential(nn.Dropout(0.5)))
    draws.enter_loop()
    with BaseTorchFunctionMode() as other:
        draws.close()
        assert _get_current_function_mode_stack() == [other]
    assert not _get_current_function_mode_stack()


def test_a_model_that_is_called_in_a_thread_of_the_loop_leaves_its_draws_alone() -> None:
    """A mode is entered in one thread."""
    draws, _ = drawing_loop([0, 1], model := nn.Sequential(nn.Dropout(0.5)))
    with draws.loop(), ThreadPoolExecutor(1) as pool:
        (mode,) = _get_current_function_mode_stack()
        assert pool.submit(model, torch.ones(2, 6)).result().shape == (2, 6)
        assert not pool.submit(_get_current_function_mode_stack).result()
        assert _get_current_function_mode_stack() == [mode]
