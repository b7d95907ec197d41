"""`Form`: the shape and dtype of what crosses a boundary between stages, and how the receiver is told.

Microbatches whose inputs have the same shapes have one form, so it is announced once, in front of the first of them.
Which these are every rank knows, for all ranks of a pipeline have the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import UserCodeError

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
        return torch.tensor(
            [_DTYPES.index(self.dtype), self.differentiable, len(self.shape), *sizes], dtype=torch.int64, device=device
        )

    @classmethod
    def read(cls, header: Tensor) -> Form:
        """The inverse of `header`."""
        dtype, differentiable, dims, *sizes = header.tolist()
        return cls(tuple(sizes[:dims]), _DTYPES[dtype], bool(differentiable))

    def empty(self, device: torch.device) -> Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)
