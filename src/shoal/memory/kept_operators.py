"""Which operators of a recomputed forward keep their outputs: recomputation by operator, "selective op" in torchtitan.

A recomputed block pays for its products twice, and holds only its input. Between that and keeping everything lies a
choice for each operator (arXiv:2410.06511, section 2.1.1): outputs that are dear to compute and small are kept, and
all else (norms, gates, rotations, casts) is computed again from them:

    kept        the outputs of fused attention, and of every second product: the second, the fourth, ...
    repeated    the other products, and everything between

So half of the products run twice in the place of all of them. The first product is the one that is repeated: the last
product of a block with seven (query, key, value, output, gate, up, down) gives what no backward needs, and what is
repeated ends before it.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` refuses a kept output that somebody writes to in place,
as `nn.ReLU(inplace=True)` does, and a second backward. Here such an output is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
)
ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)


@dataclass(frozen=True)
class _Output:
    """A tensor and the version that it had: another one says that somebody has written to it since."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Output:
        """Without the graph, which would keep everything else alive; the count of versions stays a common one."""
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            own = tensor.detach()
        return cls(own, own._version)

    @property
    def is_whole(self) -> bool:
        """Are the numbers those that the operator gave?"""
        return self.tensor._version == self.version


class KeptOperators:
    """The outputs that one forward of a block keeps, by the number of their operator."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}

    def keeping(self) -> TorchDispatchMode:
        """A mode for the forward."""
        return _Keeping(self._outputs)

    def repeating(self) -> TorchDispatchMode:
        """A mode for the repeated forward: what was kept is handed out, once, and not computed."""
        return _Repeating(self._outputs)


class _Numbered(TorchDispatchMode):
    """Numbers the operators that may be kept, in the order of their calls, which a repeated forward has too."""

    def __init__(self, outputs: dict[int, Any]) -> None:
        super().__init__()
        self._outputs = outputs
        self._operators = self._products = 0

    def _number(self, func: Any) -> int | None:
        """The number of an operator whose output is kept; None for others."""
        if func.namespace != "aten":
            return None
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            self._products += 1
            if self._products % 2:
                return None
        elif name not in ATTENTION:
            return None
        self._operators += 1
        return self._operators


class _Keeping(_Numbered):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        number = self._number(func)
        if number is not None and not _grows(func, args, result):
            self._outputs[number] = tree_map_only(Tensor, _Output.of, result)
        return result


def _grows(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether a batched product is larger than its two factors, as the scores of attention that is not fused are."""
    if func._schema.name.removeprefix("aten::") not in ("bmm", "baddbmm"):
        return False
    return result.numel() > sum(factor.numel() for factor in args[-2:])


class _Repeating(_Numbered):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        number = self._number(func)
        kept = None if number is None else self._outputs.pop(number, None)
        outputs = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, _Output)]
        if outputs and all(output.is_whole for output in outputs):
            return tree_map_only(_Output, lambda output: output.tensor, kept)
        return func(*args, **(kwargs or {}))
