"""What crosses the boundary between two stages: its form, and what it becomes on the way, as it is or in fewer bits.

    x' = decode(encode(x))              what the next stage computes with
    dL/dx = decode(encode(dL/dx'))      straight-through: coding counts as the identity in the backward

Numbers are rounded to nearest, those of a block by the scale of the block:

    int8         |x - x'| <= max |x| of the block / 254
    bfloat16     |x - x'| <= |x| / 256

The errors are no noise that averages out: for activations that hardly change from epoch to epoch it is better to send
the changes (Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with
Guarantees", arXiv:2206.01299), at the price of memory for each sample. What is not finite stays so.

Microbatches whose inputs have the same shapes have one form, so it is announced once, in front of the first of them.
Which these are every rank knows, for all ranks of a pipeline have the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.codec.codec import Codec, pack, unpack
from shoal.codec.config import BlockwiseConfig, CastConfig
from shoal.config.check import implementation_of
from shoal.errors import UserCodeError
from shoal.state import numbers_on

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 8
HEADER_NUMEL = 3 + _MOST_DIMS


@dataclass(frozen=True)
class Form:
    """`differentiable` is False where everything before the boundary is frozen: no gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, output: Tensor, *, stage: int) -> Form:
        """Raises `UserCodeError` for what cannot travel: no tensor, not floating point, or of too many dimensions."""
        if not isinstance(output, Tensor) or output.dtype not in _DTYPES or output.ndim > _MOST_DIMS:
            found = f"{output.dtype} of {output.ndim} dimensions" if isinstance(output, Tensor) else type(output)
            raise UserCodeError(
                f"stage {stage} gave {found}; between stages travels one tensor of floating point with at most "
                f"{_MOST_DIMS} dimensions: return that, and take the rest from the context"
            )
        return cls(tuple(output.shape), output.dtype, output.requires_grad)

    def header(self, device: torch.device) -> Tensor:
        """int64 `[HEADER_NUMEL]`."""
        sizes = [*self.shape, *[0] * (_MOST_DIMS - len(self.shape))]
        numbers = [_DTYPES.index(self.dtype), self.differentiable, len(self.shape), *sizes]
        return numbers_on(device, numbers, dtype=torch.int64)

    @classmethod
    def read(cls, header: Tensor) -> Form:
        """The inverse of `header`."""
        dtype, differentiable, dims, *sizes = header.tolist()
        return cls(tuple(sizes[:dims]), _DTYPES[dtype], bool(differentiable))

    def empty(self, device: torch.device) -> Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Packing(Protocol):
    """From tensors to what is sent, and back; both ends know the form."""

    def packed(self, tensor: Tensor) -> Tensor:
        """What is sent of `tensor`, contiguous."""
        ...

    def buffer(self, form: Form, device: torch.device) -> Tensor:
        """A tensor to receive it into."""
        ...

    def unpacked(self, buffer: Tensor, form: Form) -> Tensor:
        """The tensor of `form` that was received; no gradient is tracked."""
        ...


class AsItIs:
    """All bits are sent."""

    def packed(self, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    def buffer(self, form: Form, device: torch.device) -> Tensor:
        return form.empty(device)

    def unpacked(self, buffer: Tensor, form: Form) -> Tensor:
        return buffer


@dataclass(frozen=True)
class StageCodec:
    """What `codec`, which is not linear and has no random numbers, makes of the tensor."""

    codec: Codec

    def packed(self, tensor: Tensor) -> Tensor:
        return pack(self.codec, self.codec.encode(tensor))

    def buffer(self, form: Form, device: torch.device) -> Tensor:
        return torch.empty(self.codec.wire_bytes(_numel(form)), dtype=torch.uint8, device=device)

    def unpacked(self, buffer: Tensor, form: Form) -> Tensor:
        wide = torch.promote_types(form.dtype, torch.float32)
        numel = _numel(form)
        flat = self.codec.decode(unpack(self.codec, buffer, numel), numel, dtype=wide)
        return flat.to(form.dtype).view(form.shape)


def _numel(form: Form) -> int:
    return torch.Size(form.shape).numel()


AS_IT_IS = AsItIs()


def packing_of(config: CastConfig | BlockwiseConfig | None) -> Packing:
    """By the codec of this table; None: as it is."""
    return AS_IT_IS if config is None else StageCodec(implementation_of(config)(config))
