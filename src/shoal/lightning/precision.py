"""How a run computes for Lightning: in the type of `[precision]`, with the run's own backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.errors import UserCodeError
from shoal.lightning.package import fabric, part

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision
else:
    Precision = part("plugins.precision").Precision


class RunPrecision(Precision):
    """See above. `backward` computes the gradient of a loss for an optimizer, or None, `autocast` is that of the run;
    `flush` is called before the optimizer's step, or before its gradients are looked at.
    """

    def __init__(
        self,
        precision: str,
        *,
        backward: Callable[[Tensor], None],
        autocast: Callable[[], AbstractContextManager[Any]],
        flush: Callable[[Any], None],
    ) -> None:
        super().__init__()
        self.precision = precision  # pyright: ignore[reportAttributeAccessIssue]
        self._backward, self._autocast, self._flush = backward, autocast, flush
        self._double = precision == "64-true"
        self.converts = self._double
        """Whether batches come in float64, as in a comparison that `shoal verify --exact` makes."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.double() if self._double else module

    def convert_input(self, data: Any) -> Any:
        if not self.converts:
            return data
        return tree_map(_as_double, data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        if not self._double:
            return nullcontext()
        return fabric("plugins.precision.utils")._DtypeContextManager(torch.float64)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around every step of the module."""
        with self.tensor_init_context(), self._autocast():
            yield

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Raises `UserCodeError` for a backward of the module's own."""
        if args or any(value is not None for value in kwargs.values()):
            raise UserCodeError(
                "manual_backward() has further arguments: a run computes each gradient once, so retain_graph is not "
                "needed for several losses of a batch; leave them out"
            )
        self._backward(tensor)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Computes the gradient, calls the hooks, clips, and makes the update."""
        computed = self._wrap_closure(model, optimizer, closure)
        self._flush(optimizer)
        optimizer.step(**kwargs)
        return computed

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._flush(optimizer)
        super().clip_gradients(optimizer, *args, **kwargs)


def _as_double(each: Any) -> Any:
    return each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
