"""Which operators of a backward make the gradients of parameters, and not those of activations.

Autograd adds a gradient to its parameter in a node of its own. What comes in there is followed back to the operator
that made it, through casts and through sums of the gradients of a parameter that is used several times.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

PASSED_ON = frozenset({"aten._to_copy", "aten.add", "aten.clone"})


class WeightGradients:
    """`givers` are the operators that made gradients of parameters, by their place in the trace."""

    def __init__(self, model: nn.Module) -> None:
        self.givers: set[int] = set()
        self._makers: dict[int, tuple[int, ...]] = {}
        shapes = {tuple(p.shape) for p in model.parameters()}
        self._shapes = shapes | {shape[::-1] for shape in shapes}

    def follow(self, name: str, inputs: Sequence[Tensor], out: Tensor, place: int, *, ends: bool) -> None:
        """An operator, the `place`-th of the trace; `ends`: it adds to a parameter's gradient."""
        before = tuple(maker for tensor in inputs for maker in self._makers.get(_storage(tensor), ()))
        if ends:
            self.givers.update(before)
        elif tuple(out.shape) in self._shapes:
            self._makers[_storage(out)] = before if name in PASSED_ON and before else (place,)
        else:
            self._makers.pop(_storage(out), None)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
