"""Draws of a forward that a user's model repeats in the backward, by `torch.utils.checkpoint`.

PyTorch takes down the state of its own generators for that, and autograd leaves every mode before it repeats anything:
what a mode has keyed (`KeyedDraws`) would be drawn from the generators the second time, and the gradient would be that
of another mask, without a word. So what `checkpoint` is given, a module or any function, is repeated under the mode as
it was when its forward began. That is done where both kinds of checkpoint, with and without re-entrant autograd, keep
the function that they repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch.utils import checkpoint

from shoal.models.keyed_draws import KeyedDraws, active_draws

Function = Callable[..., Any]


@cache
def key_checkpoints() -> None:
    """From now on, in this process."""
    without, forward = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.forward

    @wraps(without)
    def repeats_keyed(function: Function, *args: Any, **kwargs: Any) -> Any:
        draws = active_draws()
        repeated = function if draws is None else _repeated(draws, function)
        return without(repeated, *args, **kwargs)

    @wraps(forward)
    def forward_keyed(ctx: Any, function: Function, *args: Any) -> Any:
        draws = active_draws()
        if draws is None:
            return forward(ctx, function, *args)
        repeated = _repeated(draws, function)
        result = forward(ctx, function, *args)
        ctx.run_function = repeated
        return result

    checkpoint._checkpoint_without_reentrant_generator = repeats_keyed
    setattr(checkpoint.CheckpointFunction, "forward", staticmethod(forward_keyed))  # noqa: B010


def _repeated(draws: KeyedDraws, function: Function) -> Function:
    """`function` as it will be repeated: its draws are those that it makes from here on."""
    moment = draws.moment()

    def repeated(*args: Any, **kwargs: Any) -> Any:
        with draws.replaying(moment):
            return function(*args, **kwargs)

    return repeated
