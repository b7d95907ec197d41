"""JAX among ranks: trees of arrays are summed, averaged and broadcast, in a loop and under `jax.jit`.

    import shoal.jax

    @jax.jit
    def step(parameters, batch):
        gradients = shoal.jax.all_reduce_gradients(jax.grad(loss)(parameters, batch))
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)

    parameters = shoal.jax.broadcast(parameters)       # ranks start alike
    group = shoal.wire.world()                         # group.rank, group.size

The leaves of a tree go as one vector for each dtype. Under `jit` the exchange is an ordered `io_callback`: XLA may
leave out, repeat or reorder a `pure_callback`, and ranks that call in different orders wait for ever. Arrays lie on the
CPU, or are copied there and back. One process is one rank: within it JAX may use several devices.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.errors import MissingExtra
from shoal.wire import Codec, Group, as_array, world
from shoal.wire.arrays import Array
from shoal.wire.group import Reduction


def all_reduce_gradients(
    tree: Any, group: Group | None = None, *, op: Reduction = "avg", codec: Codec | None = None
) -> Any:
    """The mean (or, by `op`, the sum, ...) of the ranks' trees, leaf by leaf; all have the same structure.

    `group`: see `shoal.wire.world`. `codec` is that of `Group.all_reduce`; one with error feedback is for one tree.
    """
    return _exchanged(tree, lambda flat: _group(group).all_reduce(flat, op, out=flat, codec=codec))


def broadcast(tree: Any, group: Group | None = None, *, root: int = 0) -> Any:
    """The tree of rank `root`, on every rank."""
    return _exchanged(tree, lambda flat: _group(group).broadcast(flat, root=root, out=flat))


def _group(given: Group | None) -> Group:
    return world() if given is None else given


def _exchanged(tree: Any, exchange: Callable[[Array], object]) -> Any:
    """`tree` after `exchange` of its leaves, in place, as one vector for each dtype."""
    jax = _jax()
    leaves, structure = jax.tree.flatten(tree)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        call = importlib.import_module("jax.experimental").io_callback
        found = call(lambda *arrays: fused(arrays, exchange), shapes, *leaves, ordered=True)
    else:
        found = [jax.numpy.asarray(array) for array in fused(leaves, exchange)]
    return jax.tree.unflatten(structure, found)


def fused(leaves: Sequence[Any], exchange: Callable[[Array], object]) -> list[Array]:
    """The leaves after `exchange` of one flat vector for each dtype, which it changes in place."""
    arrays = [as_array(leaf) for leaf in leaves]
    found: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        places = [place for place, array in enumerate(arrays) if array.dtype == dtype]
        flat = np.concatenate([arrays[place].reshape(-1) for place in places])
        exchange(flat)
        begin = 0
        for place in places:
            end = begin + arrays[place].size
            found[place] = flat[begin:end].reshape(arrays[place].shape)
            begin = end
    return found


def _jax() -> Any:
    try:
        return importlib.import_module("jax")
    except ImportError:
        raise MissingExtra("jax", extra="jax", purpose="shoal.jax") from None
