"""AdamW whose moments are kept in 8 bits (Dettmers et al., arXiv:2110.02861), decoded and encoded block by block.

    m = b1 m' + (1 - b1) g,    v = b2 v' + (1 - b2) g^2        m', v' decoded
    x <- (1 - lr w) x - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

All in float32, or in float64 for parameters of it. x moves by m and v as they are, and these are encoded for the next
step (`shoal.codec.moments`). So on a CPU a step that begins with the same moments gives the same weights wherever
blocks begin; the moments that it leaves are those of its blocks.

On a CPU a loop in C does it in one pass (`codec/core/adam.c`). On a GPU with Triton it is one function that Inductor
compiles (`step_compiled`): where it makes one kernel of it, each number is read and written once,

    x and g read, x written, both codes read and written, and scales:    16 + 4/64 bytes,    AdamW's are 28

What follows in torch is the oracle of both (on a CPU bit by bit, of finite numbers; a GPU may round last bits in its
own way), and what runs on other devices, for other dtypes, without a C compiler or
Triton: in chunks, so that float32 copies stay small, in eight times AdamW's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.codec.config import MOMENT_BLOCK
from shoal.codec.kernels import Kernels, compiled, compiles_for, kernels_for
from shoal.codec.moments import TINIEST, Map, Quantised, map_of, quantised, zeros
from shoal.optim.config import AdamW8bit
from shoal.optim.fused import FusedAdamW
from shoal.state import numbers_on

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Each slot, and whether its numbers have signs."""
_CHUNK = {"cpu": 1 << 16}
_CHUNK_ELSEWHERE = 1 << 23
"""Numbers that the torch form decodes at a time: as many as a cache holds; elsewhere enough to be worth a launch."""


def build(config: AdamW8bit, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file. Groups that say `small` keep their moments as AdamW does."""
    return EightBitAdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps)


class _Factors(NamedTuple):
    """What a step multiplies by, in the order of `core/adam.c`."""

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    root: float
    eps: float
    kept: float
    rate: float


class EightBitAdamW(FusedAdamW):
    """AdamW with `Quantised` moments; in groups with `small` it is `FusedAdamW`.

    A moment that is a tensor, as it is read from a checkpoint, is used as it is, and left in 8 bits. Arguments are
    those of `FusedAdamW`.
    """

    def pack(self) -> None:
        """Encodes the moments that are tensors, one after the other; not those of groups that another kind steps."""
        for group in self.param_groups:
            for parameter in () if group.get("small") or "kind" in group else group["params"]:
                state = self.state.get(parameter, {})
                for name, signed in MOMENTS.items():
                    if isinstance(state.get(name), Tensor):
                        state[name] = quantised(state[name], signed=signed)

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's, with the numbers that 8 bits stand for: `torch.load` reads them without being told to trust a
        class, and AdamW can go on from them.
        """
        found = super().state_dict()
        found["state"] = {number: dict(map(_decoded, state.items())) for number, state in found["state"].items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of `state_dict` over, or AdamW's, and keeps it in 8 bits."""
        super().load_state_dict(state_dict)
        self.pack()

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """One step. States that are not there yet begin at zero."""
        if group.get("small"):
            super().update(group, parameters, gradients)
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{name: zeros(parameter, signed=signed) for name, signed in MOMENTS.items()},
                }
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
        for parameter, gradient, state, step in zip(
            parameters, gradients, states, torch.stack(steps).tolist(), strict=True
        ):
            factors = _factors(group, step)
            if all(isinstance(state[name], Quantised) for name in MOMENTS):
                step_(parameter, gradient, (state["exp_avg"], state["exp_avg_sq"]), factors)
            else:
                self._from_tensors(parameter, gradient, state, factors)

    def _from_tensors(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], factors: _Factors) -> None:
        given = [state[name] for name in MOMENTS]
        first, second = (m.decoded() if isinstance(m, Quantised) else m.detach() for m in given)
        first, second = _moved(parameter, gradient, first, second, factors)
        for (name, signed), moment in zip(MOMENTS.items(), (first, second), strict=True):
            state[name] = quantised(moment, signed=signed)


def _decoded(slot: tuple[str, Any]) -> tuple[str, Any]:
    name, value = slot
    return name, value.decoded() if isinstance(value, Quantised) else value


def _factors(group: dict[str, Any], step: float) -> _Factors:
    (beta1, beta2), lr = group["betas"], group["lr"]
    root, rate = (1 - beta2**step) ** 0.5, lr / (1 - beta1**step)
    return _Factors(beta1, 1 - beta1, beta2, 1 - beta2, root, group["eps"], 1 - lr * group["weight_decay"], rate)


def step_(x: Tensor, gradient: Tensor, moments: tuple[Quantised, Quantised], factors: _Factors) -> None:
    """One step of `x` and its moments, in place."""
    kernels, dense = kernels_for(x, gradient), x.is_contiguous() and gradient.is_contiguous()
    if kernels is not None and dense:
        step_in_c(kernels, x, gradient, moments, factors)
    elif dense and x.dtype != torch.float64 and compiles_for(x):
        step_compiled(x, gradient, moments, factors)
    else:
        step_in_torch(x, gradient, moments, factors)


def step_in_c(kernels: Kernels, x: Tensor, gradient: Tensor, moments: Iterable[Quantised], factors: _Factors) -> None:
    """The same by the kernel: both float32, contiguous and on the CPU."""
    first, second = (moment.kernel_form for moment in moments)
    kernels.adam(x, gradient, (first, second), factors, block=MOMENT_BLOCK)


def step_compiled(x: Tensor, gradient: Tensor, moments: tuple[Quantised, Quantised], factors: _Factors) -> None:
    """The same by a function that Inductor compiles once for all sizes: `x` of 32 bits or 16, both contiguous. What is
    behind the last whole block is left to torch's operators.
    """
    flat, gradients = x.detach().view(-1), gradient.view(-1)
    whole = flat.numel() // MOMENT_BLOCK * MOMENT_BLOCK
    numbers = numbers_on(x.device, factors, dtype=torch.float32)
    if whole:
        parts = [moment.part(0, whole) for moment in moments]
        maps = [map_of(part.codes.dtype, x.device) for part in parts]
        compiled(step_of_blocks)(flat[:whole], gradients[:whole], *parts, *maps, numbers)
    if whole < flat.numel():
        first, second = (moment.part(whole, flat.numel()) for moment in moments)
        step_in_torch(flat[whole:], gradients[whole:], (first, second), factors)


def step_of_blocks(
    x: Tensor, gradient: Tensor, first: Quantised, second: Quantised, signed: Map, unsigned: Map, factors: Tensor
) -> None:
    """One step of whole blocks, all one-dimensional, to be compiled. `factors` are `_Factors`, float32 `[8]`."""
    beta1, rest1, beta2, rest2, root, eps, kept, rate = factors.unbind()
    g = gradient.view(-1, MOMENT_BLOCK).float()
    m = signed.values[first.codes.view(-1, MOMENT_BLOCK).int()] * first.scales[:, None] * beta1 + g * rest1
    v = unsigned.values[second.codes.view(-1, MOMENT_BLOCK).int()] * second.scales[:, None] * beta2 + g * g * rest2
    step = m / (v.sqrt() / root + eps) * rate
    x.copy_((x.view(-1, MOMENT_BLOCK).float() * kept - step).view(-1))
    for (codes, scales), moment, borders in ((first, m, signed.borders), (second, v, unsigned.borders)):
        scale = moment.abs().amax(1).clamp(min=TINIEST)
        level = torch.bucketize(moment / scale[:, None], borders, out_int32=True)
        codes.copy_((level if codes.dtype == torch.uint8 else level - len(borders) // 2).view(-1))
        scales.copy_(scale)


def step_in_torch(x: Tensor, gradient: Tensor, moments: tuple[Quantised, Quantised], factors: _Factors) -> None:
    """The same by torch's operators."""
    flat = x.detach().reshape(-1)
    chunk, gradients = _CHUNK.get(x.device.type, _CHUNK_ELSEWHERE), gradient.reshape(-1)
    for start in range(0, flat.numel(), chunk):
        stop = min(start + chunk, flat.numel())
        first, second = (moment.part(start, stop) for moment in moments)
        found = _moved(
            flat[start:stop], gradients[start:stop], first.decoded_in_torch(), second.decoded_in_torch(), factors
        )
        first.encode_in_torch_(found[0])
        second.encode_in_torch_(found[1])
    if flat.data_ptr() != x.data_ptr():
        x.detach().copy_(flat.view(x.shape))


def _moved(x: Tensor, gradient: Tensor, first: Tensor, second: Tensor, f: _Factors) -> tuple[Tensor, Tensor]:
    """Moves `x`; both moments after it, in the place of those before. Plain products and sums, so that no fused
    multiply-add rounds otherwise.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    gradient, first, second = gradient.to(dtype), first.to(dtype).mul_(f.beta1), second.to(dtype).mul_(f.beta2)
    first += gradient * f.rest1
    second += (gradient * gradient).mul_(f.rest2)
    step = (first / _root(second).div_(f.root).add_(f.eps)).mul_(f.rate)
    x.copy_((x.to(dtype) * f.kept).sub_(step))
    return first.float(), second.float()


def _root(x: Tensor) -> Tensor:
    """The square root, rounded to nearest: on a CPU, MKL's of float32 is off by a last bit for one number in twelve."""
    return x.double().sqrt().to(x.dtype) if x.device.type == "cpu" else x.sqrt()
