"""Keras and TensorFlow among ranks, by Horovod's names; `import shoal.keras as hvd` in the place of `horovod.keras`.

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

Keras runs on TensorFlow or on JAX here (KERAS_BACKEND). A loop of one's own over `tf.GradientTape` calls
`all_reduce_gradients`. Under `tf.function` the exchange is a `tf.numpy_function`, on the CPU; all gradients of a step
go as one vector for each dtype, so that one call a step is ordered.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.errors import MissingExtra, UsageError
from shoal.jax import all_reduce_gradients as all_reduce_tree
from shoal.jax import fused
from shoal.wire import Group, world
from shoal.wire.group import Reduction


def init() -> None:
    """Meets the other ranks of the launcher."""
    world()


def rank() -> int:
    """This process among all."""
    return world().rank


def size() -> int:
    """How many processes there are."""
    return world().size


def local_rank() -> int:
    """This process among those of its host."""
    return world().local_rank


def all_reduce_gradients(gradients: Sequence[Any], group: Group | None = None, *, op: Reduction = "avg") -> list[Any]:
    """The mean of the ranks' gradients: TensorFlow's tensors, also within a `tf.function`, or JAX's arrays.

    A gradient that is None stays None; it has to be on all ranks.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    reduced = iter(_reduced(given, world() if group is None else group, op))
    return [None if gradient is None else next(reduced) for gradient in gradients]


def DistributedOptimizer(optimizer: Any, group: Group | None = None) -> Any:
    """`optimizer`, of Keras, which averages gradients over all ranks before it applies them; of its class."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return base.apply(self, all_reduce_gradients(list(grads), group), trainable_variables)

    base: Any = type(optimizer)
    kind = type(base.__name__, (base,), {"apply": apply})
    return kind.from_config(optimizer.get_config())


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Keras's or TensorFlow's variables become those of `root_rank`."""
    held = list(variables)
    values = [_numpy(variable) for variable in held]
    for variable, value in zip(held, fused(values, lambda v: world().broadcast(v, root=root_rank, out=v)), strict=True):
        variable.assign(value)


class callbacks:
    """Horovod's callbacks for `model.fit`."""

    @staticmethod
    def BroadcastGlobalVariablesCallback(root_rank: int = 0) -> Any:
        """Before the first batch, weights and optimizer become those of `root_rank`."""

        def on_train_begin(self: Any, logs: Any = None) -> None:
            self.model.optimizer.build(self.model.trainable_variables)
            broadcast_variables([*self.model.variables, *self.model.optimizer.variables], root_rank)

        return _callback("BroadcastGlobalVariablesCallback", on_train_begin=on_train_begin)

    @staticmethod
    def MetricAverageCallback() -> Any:
        """Figures of an epoch become their means over all ranks."""

        def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
            for name in sorted(logs or {}):
                logs[name] = float(world().all_reduce(_numpy(logs[name]).astype("float64"), op="avg"))

        return _callback("MetricAverageCallback", on_epoch_end=on_epoch_end)


def _reduced(given: list[Any], group: Group, op: Reduction) -> list[Any]:
    if not given or not _is_tensorflow(given[0]):
        return list(all_reduce_tree(given, group, op=op))
    tensorflow: Any = sys.modules["tensorflow"]
    dense = [tensorflow.convert_to_tensor(gradient) for gradient in given]

    def exchange(*arrays: Any) -> list[Any]:
        return fused(arrays, lambda flat: group.all_reduce(flat, op, out=flat))

    found = tensorflow.numpy_function(exchange, dense, [each.dtype for each in dense])
    for tensor, whole in zip(found, dense, strict=True):
        tensor.set_shape(whole.shape)
    return list(found)


def _is_tensorflow(value: Any) -> bool:
    return type(value).__module__.startswith("tensorflow")


def _numpy(value: Any) -> Any:
    numpy: Any = importlib.import_module("numpy")
    return numpy.array(value.numpy() if hasattr(value, "numpy") else value)


def _callback(name: str, **methods: Any) -> Any:
    try:
        keras: Any = importlib.import_module("keras")
    except ImportError:
        raise MissingExtra("keras", extra="tensorflow", purpose="shoal.keras") from None
    if keras.backend.backend() not in ("tensorflow", "jax"):
        raise UsageError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND to tensorflow or jax, or use shoal.horovod"
        )
    return type(name, (keras.callbacks.Callback,), methods)()
