"""Keras and TensorFlow among ranks, by Horovod's names; `import shoal.keras as hvd` in the place of `horovod.keras`.

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

Keras runs on TensorFlow or on JAX here (KERAS_BACKEND). A loop of one's own over `tf.GradientTape` calls
`all_reduce_gradients`. Under `tf.function` the exchange is a `tf.numpy_function`, on the CPU; all gradients of a step
go as one vector for each dtype, so that one call a step is ordered. Of sparse gradients (`tf.IndexedSlices`) all ranks
get the rows of each, as Keras's optimizers treat them otherwise than dense ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def all_reduce_gradients(
    gradients: Sequence[Any], group: Group | None = None, *, op: Reduction = "avg", sparse_as_dense: bool = False
) -> list[Any]:
    """The mean of the ranks' gradients: TensorFlow's tensors, also within a `tf.function`, or JAX's arrays.

    A gradient that is None stays None; it has to be on all ranks. A sparse one, of "avg" or "sum", stays sparse unless
    `sparse_as_dense`.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    reduced = iter(_reduced(given, world() if group is None else group, op, sparse_as_dense=sparse_as_dense))
    return [None if gradient is None else next(reduced) for gradient in gradients]


Average: Reduction = "avg"
Sum: Reduction = "sum"


class Compression:
    """What gradients become on the wire, of 64 bits as well as of 32."""

    none: str | None = None
    fp16: str | None = "float16"
    bf16: str | None = "bfloat16"


_PIECES = ("name", "device_dense", "device_sparse", "num_groups", "groups")
"""Of Horovod's arguments: where gradients are summed, and in which pieces; their means are the same."""


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, *, group: Group | None = None, op: Reduction = Average,
    compression: str | None = Compression.none, backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False, sparse_as_dense: bool = False, **pieces: Any,
) -> Any:  # fmt: skip
    """`optimizer`, of Keras, which averages (`op`) gradients over all ranks before it applies them; of its class, under
    whose name it is saved. `sparse_as_dense`: sparse gradients are made dense first. `name` and `pieces` are Horovod's,
    and change nothing here.

    `backward_passes_per_step`: Keras adds up that many means of batches, and divides by their number. Raises
    `UsageError` for a sum of them (`average_aggregated_gradients` false), for other arguments, and for a `name` that is
    no text.
    """
    if not isinstance(name, str | None):
        raise UsageError(
            f"DistributedOptimizer takes a text for name, its second argument, and found {type(name).__name__}: give a "
            "group as group=..."
        )
    if unknown := [each for each in pieces if each not in _PIECES]:
        raise UsageError(f"DistributedOptimizer knows no {', '.join(unknown)}: leave it out")
    settings = optimizer.get_config()
    if backward_passes_per_step > 1:
        if not average_aggregated_gradients:
            raise UsageError(
                f"Keras averages the gradients of {backward_passes_per_step} passes: give "
                "average_aggregated_gradients=True, and multiply the learning rate where a sum is meant"
            )
        settings["gradient_accumulation_steps"] = backward_passes_per_step
    return _averaging(type(optimizer), group, op, compression, sparse_as_dense).from_config(settings)


def load_model(
    filepath: Any, *, group: Group | None = None, op: Reduction = Average, compression: str | None = Compression.none,
    sparse_as_dense: bool = False, **named: Any,
) -> Any:  # fmt: skip
    """A saved Keras model, whose optimizer goes on where it was, averaging gradients over all ranks; a model without
    one (`compile=False`) as it is. `named` goes to `keras.models.load_model`.
    """
    model = _keras().models.load_model(filepath, **named)
    if getattr(model, "optimizer", None) is None:
        return model
    model.optimizer.__class__ = _averaging(type(model.optimizer), group, op, compression, sparse_as_dense)
    return model


def _averaging(base: Any, group: Group | None, op: Reduction, compression: str | None, sparse_as_dense: bool) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return base.apply(self, reduced(list(grads)), trainable_variables)

    def reduced(gradients: list[Any]) -> list[Any]:
        if compression is None:
            return all_reduce_gradients(gradients, group, op=op, sparse_as_dense=sparse_as_dense)
        cast = _keras().ops.cast
        short = [None if each is None else cast(each, compression) for each in gradients]
        found = all_reduce_gradients(short, group, op=op, sparse_as_dense=sparse_as_dense)
        return [None if each is None else cast(each, like.dtype) for each, like in zip(found, gradients, strict=True)]

    return type(base.__name__, (base,), {"apply": apply, "__module__": base.__module__})


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
            if _keras().backend.backend() == "tensorflow" and self.model.jit_compile:
                raise UsageError(
                    "compile(jit_compile=True): XLA compiles no exchange between ranks on TensorFlow; leave it out, or "
                    "set KERAS_BACKEND to jax"
                )
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

    @staticmethod
    def LearningRateScheduleCallback(
        initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: int = 0,
        end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool | None = None,
        steps_per_epoch: int | None = None,
    ) -> Any:  # fmt: skip
        """From `start_epoch` until `end_epoch` the rate is `initial_lr` times `multiplier`, of the epoch: whole ones,
        or (`staircase` false) with the part that is over.

        There is no momentum correction, as Keras 3 compiles the momentum into the step: raises `UsageError` when
        training begins where `momentum_correction` is True and the optimizer has momentum.
        """
        factor = multiplier if callable(multiplier) else lambda epoch: multiplier
        methods = _schedule_methods(
            lambda at, steps: initial_lr * factor(at), (start_epoch, end_epoch), staircase, steps_per_epoch
        )
        return _schedule("LearningRateScheduleCallback", methods, momentum_correction)

    @staticmethod
    def LearningRateWarmupCallback(
        initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool | None = None,
        steps_per_epoch: int | None = None, verbose: int = 0,
    ) -> Any:  # fmt: skip
        """The rate rises from `initial_lr` over the number of ranks to `initial_lr` (Goyal et al., arXiv:1706.02677,
        section 2.2), batch by batch. The last batch of the last of `warmup_epochs` has `initial_lr`, which stays;
        rank 0 says so (`verbose`). `momentum_correction` as in `LearningRateScheduleCallback`.
        """

        def rate(at: float, steps: int) -> float:
            return initial_lr * (1 + (at + 1 / steps) / warmup_epochs * (size() - 1)) / size()

        def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
            if verbose and epoch == warmup_epochs - 1 and rank() == 0:
                print(f"\nepoch {epoch + 1}: the learning rate has risen to {initial_lr:g}")

        methods = _schedule_methods(rate, (0, warmup_epochs), False, steps_per_epoch)
        methods["on_epoch_end"] = on_epoch_end
        return _schedule("LearningRateWarmupCallback", methods, momentum_correction)


def _schedule_methods(
    rate: Callable[[float, int], float], epochs: tuple[int, int | None], staircase: bool, steps_per_epoch: int | None
) -> dict[str, Any]:
    """Of a callback that sets the rate, from (epoch, batches of one), within `epochs`."""
    (first, end), epoch = epochs, [0]

    def set_rate(self: Any, at: float) -> None:
        if first <= at and (end is None or at < end):
            getattr(self.model, "jax_state_sync", dict)()  # on JAX an epoch's variables are not in the model
            self.model.optimizer.learning_rate = rate(at, steps_per_epoch or self.params["steps"] or 1)

    def on_epoch_begin(self: Any, number: int, logs: Any = None) -> None:
        epoch[0] = number
        if staircase:
            set_rate(self, number)

    def on_train_batch_begin(self: Any, batch: int, logs: Any = None) -> None:
        if staircase:
            return
        steps = steps_per_epoch or self.params["steps"]
        if not steps:
            raise UsageError("how many batches an epoch has is not known before it is over: give steps_per_epoch")
        set_rate(self, epoch[0] + batch / steps)

    return {"on_epoch_begin": on_epoch_begin, "on_train_batch_begin": on_train_batch_begin}


def _schedule(name: str, methods: dict[str, Any], momentum_correction: bool | None) -> Any:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if momentum_correction and getattr(self.model.optimizer, "momentum", 0):
            raise UsageError(
                "momentum_correction=True cannot be had: Keras 3 compiles the momentum into the step. Leave it out"
            )

    return _callback(name, on_train_begin=on_train_begin, **methods)


def _reduced(given: list[Any], group: Group, op: Reduction, *, sparse_as_dense: bool) -> list[Any]:
    if not given or not _is_tensorflow(given[0]):
        return list(all_reduce_tree(given, group, op=op))
    tensorflow: Any = sys.modules["tensorflow"]
    stays = not sparse_as_dense and op in (Average, Sum)
    kept = [stays and isinstance(each, tensorflow.IndexedSlices) for each in given]
    sparse = [each for each, is_kept in zip(given, kept, strict=True) if is_kept]
    dense = [tensorflow.convert_to_tensor(each) for each, is_kept in zip(given, kept, strict=True) if not is_kept]
    rows = [part for each in sparse for part in (each.values, each.indices)]

    def exchange(*arrays: Any) -> list[Any]:
        reduced = fused(arrays[: len(dense)], lambda flat: group.all_reduce(flat, op, out=flat))
        return [*reduced, *_all_rows(arrays[len(dense) :], group, op)]

    found = tensorflow.numpy_function(exchange, [*dense, *rows], [each.dtype for each in (*dense, *rows)])
    for tensor, whole in zip(found, dense, strict=False):
        tensor.set_shape(whole.shape)
    slices, reduced = _as_slices(tensorflow, sparse, found[len(dense) :]), iter(found[: len(dense)])
    return [next(slices if is_kept else reduced) for is_kept in kept]


def _all_rows(parts: Sequence[Any], group: Group, op: Reduction) -> list[Any]:
    """Of values `[rows, ...]` and indices `[rows]` in turn, those of all ranks; values by the number of ranks."""
    numpy: Any = importlib.import_module("numpy")
    found = []
    for place, part in enumerate(parts):
        came = group.all_to_all_uneven([part.reshape(-1)] * group.size)
        whole = numpy.concatenate(came).reshape(-1, *part.shape[1:])
        found.append(whole / part.dtype.type(group.size) if op == Average and place % 2 == 0 else whole)
    return found


def _as_slices(tensorflow: Any, sparse: Sequence[Any], parts: Sequence[Any]) -> Iterator[Any]:
    for number, each in enumerate(sparse):
        values, indices = parts[2 * number], parts[2 * number + 1]
        values.set_shape([None, *each.values.shape[1:]])
        indices.set_shape([None])
        yield tensorflow.IndexedSlices(values, indices, each.dense_shape)


def _is_tensorflow(value: Any) -> bool:
    return type(value).__module__.startswith("tensorflow")


def _numpy(value: Any) -> Any:
    numpy: Any = importlib.import_module("numpy")
    return numpy.array(value.numpy() if hasattr(value, "numpy") else value)


def _keras() -> Any:
    try:
        return importlib.import_module("keras")
    except ImportError:
        raise MissingExtra("keras", extra="tensorflow", purpose="shoal.keras") from None


def _callback(name: str, **methods: Any) -> Any:
    keras = _keras()
    if keras.backend.backend() not in ("tensorflow", "jax"):
        raise UsageError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND to tensorflow or jax, or use shoal.horovod"
        )
    return type(name, (keras.callbacks.Callback,), methods)()
