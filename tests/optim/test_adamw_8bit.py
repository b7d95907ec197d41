"""AdamW with moments in 8 bits, beside AdamW and between its two forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.codec.config import MOMENT_BLOCK as BLOCK
from shoal.codec.moments import Quantised, quantised
from shoal.memory.tracker import storage_bytes
from shoal.optim import adamw_8bit
from shoal.optim.adamw_8bit import MOMENTS, EightBitAdamW, step_compiled, step_in_c, step_in_torch
from shoal.optim.build import build_optimizer, part_of
from shoal.optim.config import AdamW, AdamW8bit
from shoal.optim.slots import make_slots, named_slots, pack_slots
from tests.codec.test_kernels import built, kernels_built

CONFIG = AdamW8bit(lr=1e-2)
LR = 1e-2
FACTORS = adamw_8bit._Factors(0.9, 0.1, 0.95, 0.05, 0.4, 1e-8, 0.999, 2e-3)
LARGE, SMALL = (80, 64), (63,)


def moments(numel: int) -> tuple[Quantised, Quantised]:
    first, second = (quantised(torch.zeros(numel), signed=signed) for signed in MOMENTS.values())
    return first, second


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[str, Parameter, bool]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": LARGE, "b": SMALL, "empty": (0,)}
    return [(n, Parameter(torch.randn(s, generator=generator).to(dtype)), len(s) > 1) for n, s in shapes.items()]


def give_gradients(parameters: list[tuple[str, Parameter, bool]], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for _, parameter, _ in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def taken(config: AdamW, steps: int, dtype: torch.dtype = torch.float32) -> tuple[torch.optim.Optimizer, list]:
    parameters = model(dtype=dtype)
    optimizer = build_optimizer(config, parameters, lr=LR)
    for step in range(steps):
        give_gradients(parameters, step)
        optimizer.step()
    return optimizer, parameters


@kernels_built
@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 70_001])
def test_the_kernel_gives_what_torch_gives(numel: int) -> None:
    """Weights, codes and scales, bit by bit, over steps with gradients of all magnitudes and of zeros alone."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator)
    y, ours, theirs = x.clone(), moments(numel), moments(numel)
    for step in range(12):
        gradient = torch.randn(numel, generator=generator) * torch.logspace(-42, 3, max(numel, 1))[:numel]
        gradient *= step != 5
        step_in_c(built(), x, gradient, ours, FACTORS)
        step_in_torch(y, gradient, theirs, FACTORS)
        assert torch.equal(x, y), step
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)


@kernels_built
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_a_step_of_what_is_no_number_is_seen(spoilt: float) -> None:
    """In the block that has it, and in no other, by the kernel as by torch."""
    for step in (step_in_torch, lambda *given: step_in_c(built(), *given)):
        x, gradient, held = torch.zeros(3 * BLOCK), torch.ones(3 * BLOCK), moments(3 * BLOCK)
        gradient[BLOCK + 5] = spoilt
        step(x, gradient, held, FACTORS)
        finite = held[0].decoded().view(3, BLOCK).isfinite().all(dim=1)
        assert finite.tolist() == [True, False, True]


def test_the_first_step_is_that_of_adamw() -> None:
    """It is made before the moments are rounded."""
    (_, ours), (_, theirs) = taken(CONFIG, 1), taken(AdamW(lr=1e-2), 1)
    for (_, a, _), (_, b, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_small_parameters_are_those_of_adamw() -> None:
    """Bit by bit, and so is their state."""
    (own, ours), (peer, theirs) = taken(CONFIG, 9), taken(AdamW(lr=1e-2), 9)
    assert torch.equal(ours[1][1], theirs[1][1])
    for name, value in peer.state[theirs[1][1]].items():
        assert torch.equal(own.state[ours[1][1]][name], value)


def test_a_part_of_a_large_parameter_is_in_8_bits() -> None:
    """What decides is how large the whole is, so that the layout does not."""
    piece = Parameter(torch.zeros(BLOCK))
    for shapes, kind in (({"w": (64, 64)}, Quantised), ({"w": (4095,)}, Tensor), (None, Tensor)):
        optimizer = build_optimizer(CONFIG, [("w", piece, True)], lr=LR, shapes=shapes)
        piece.grad = torch.ones_like(piece)
        optimizer.step()
        assert isinstance(optimizer.state[piece]["exp_avg"], kind)


def test_a_run_of_blocks_steps_as_in_the_whole() -> None:
    """A parameter cut between blocks, as ZeRO cuts it: the same bits in two optimizers as in one."""
    _, ((_, whole, _), *_) = taken(CONFIG, 6)
    start = model()[0][1].detach().view(-1)
    for begin, end in ((0, 3 * BLOCK), (3 * BLOCK, whole.numel())):
        piece = Parameter(start[begin:end].clone())
        optimizer = build_optimizer(CONFIG, [("w", piece, True)], lr=LR, shapes={"w": tuple(whole.shape)})
        for step in range(6):
            parameters = model()
            give_gradients(parameters, step)
            assert parameters[0][1].grad is not None
            piece.grad = parameters[0][1].grad.view(-1)[begin:end].clone()
            optimizer.step()
        assert torch.equal(piece, whole.detach().view(-1)[begin:end])


def test_moments_take_two_bytes_a_number() -> None:
    """And a float32 scale each for a block."""
    optimizer, ((_, parameter, _), *_) = taken(CONFIG, 2)
    numel = parameter.numel()
    held = [tensor for name in MOMENTS for tensor in optimizer.state[parameter][name]]
    assert storage_bytes(held) == 2 * (numel + 4 * numel // BLOCK)
    declared = sum(slot.number_bytes or 0 for slot in CONFIG.slots)
    assert storage_bytes(held) == declared * numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_that_is_saved_and_read_goes_on_in_every_bit(dtype: torch.dtype) -> None:
    """Saved as float32 numbers; read into an optimizer that has taken no step."""
    first, parameters = taken(CONFIG, 4, dtype)
    named = [(name, parameter) for name, parameter, _ in parameters]
    saved = named_slots(first, named)
    assert saved["exp_avg/w"].dtype == torch.float32
    others = [(name, Parameter(p.detach().clone()), decays) for name, p, decays in parameters]
    second = build_optimizer(CONFIG, others, lr=LR)
    dtypes = {name: slot.dtype for name, slot in saved.items()}
    for name, slot in make_slots(second, [(n, p) for n, p, _ in others], dtypes, slots=CONFIG.slots).items():
        slot.copy_(saved[name])
    pack_slots(second)
    assert isinstance(second.state[others[0][1]]["exp_avg"], Quantised)
    for step in (5, 6):
        for held, optimizer in ((parameters, first), (others, second)):
            give_gradients(held, step)
            optimizer.step()
    assert all(torch.equal(a, b) for (_, a, _), (_, b, _) in zip(parameters, others, strict=True))
    left = [named_slots(o, [(n, p) for n, p, _ in held]) for o, held in ((first, parameters), (second, others))]
    assert all(torch.equal(left[0][name], slot) for name, slot in left[1].items())


def test_moments_that_are_tensors_are_used_as_they_are() -> None:
    """As `shoal verify` gives them: a step of theirs is AdamW's, and leaves them in 8 bits."""
    own, ours = taken(CONFIG, 0)
    peer, theirs = taken(AdamW(lr=1e-2), 3)
    own.state[ours[0][1]] = {name: value.clone() for name, value in peer.state[theirs[0][1]].items()}
    ours[0][1].data.copy_(theirs[0][1])
    for held, optimizer in ((ours, own), (theirs, peer)):
        give_gradients(held, 7)
        optimizer.step()
    torch.testing.assert_close(ours[0][1], theirs[0][1], rtol=1e-6, atol=1e-7)
    assert isinstance(own.state[ours[0][1]]["exp_avg_sq"], Quantised)


def test_a_part_of_the_optimizer_steps_what_it_was_given() -> None:
    """As the schedule by priority steps it: state is shared."""
    whole, parameters = taken(CONFIG, 3)
    part = part_of(whole, [parameters[0][1]])
    give_gradients(parameters, 8)
    before = parameters[1][1].detach().clone()
    part.step()
    assert torch.equal(parameters[1][1], before)
    assert float(whole.state[parameters[0][1]]["step"]) == 4


def test_a_gradient_with_gaps_in_memory_is_read_in_order() -> None:
    """The kernel reads contiguous memory; torch's form takes the rest."""
    results = []
    for transposed in (False, True):
        parameter = Parameter(torch.zeros(LARGE))
        gradient = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
        parameter.grad = gradient.t().contiguous().t() if transposed else gradient
        optimizer = build_optimizer(CONFIG, [("w", parameter, True)], lr=LR)
        optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)


def test_every_parameter_counts_its_own_steps() -> None:
    """Each has its own count of steps: one without a gradient stands still."""
    parameters = [("a", Parameter(torch.zeros(LARGE)), True), ("c", Parameter(torch.zeros(LARGE)), True)]
    optimizer = build_optimizer(CONFIG, parameters, lr=LR)
    assert isinstance(optimizer, EightBitAdamW)
    for step in range(3):
        give_gradients(parameters, step)
        if step:
            parameters[1][1].grad = None
        optimizer.step()
    assert [float(optimizer.state[p]["step"]) for _, p, _ in parameters] == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_for_a_gpu_gives_what_torch_gives(dtype: torch.dtype) -> None:
    """Weights, codes and scales, bit by bit on a CPU; one program for all sizes, one that is no multiple of a block."""
    for numel in (BLOCK - 1, 3 * BLOCK, 9 * BLOCK + 17):
        generator = torch.Generator().manual_seed(numel)
        x = torch.randn(numel, generator=generator).to(dtype)
        y, ours, theirs = x.clone(), moments(numel), moments(numel)
        for _ in range(4):
            gradient = (torch.randn(numel, generator=generator) * torch.logspace(-30, 3, numel)).to(dtype)
            step_compiled(x, gradient, ours, FACTORS)
            step_in_torch(y, gradient, theirs, FACTORS)
            assert torch.equal(x, y)
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one.codes, other.codes)
                assert torch.equal(one.scales, other.scales)
