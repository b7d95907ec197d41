"""Keras models train on ranks as on one process with the whole batch, on TensorFlow and on JAX."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.keras import DistributedOptimizer
from tests.wire.processes import EPILOGUE, PRELUDE, run_codes

CLOSE = 1e-4  # float32
FITS = """
os.environ["KERAS_BACKEND"], os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["CUDA_VISIBLE_DEVICES"] = BACKEND, "3", ""
import tempfile
import keras
import shoal.keras as hvd
hvd.world = lambda: group

def model(optimizer):
    keras.utils.set_random_seed(1)
    found = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    found.compile(optimizer=optimizer, loss="mse")
    return found

draw = np.random.default_rng(0)
x, y = draw.standard_normal((32, 6)).astype("float32"), draw.standard_normal((32, 1)).astype("float32")
share = slice(group.rank * 16, (group.rank + 1) * 16)
calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
ours = model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)))
if group.rank:
    ours.set_weights([w + 1 for w in ours.get_weights()])
seen = ours.fit(x[share], y[share], batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=calls)
alone = model(keras.optimizers.SGD(0.1, momentum=0.5))
want = alone.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0)
flat = lambda m: np.concatenate([w.ravel() for w in m.get_weights()]).tolist()
result = [flat(ours), flat(alone), seen.history["loss"], want.history["loss"]]

with tempfile.TemporaryDirectory() as folder:
    ours.save(f"{folder}/model.keras")
    plain, again = keras.models.load_model(f"{folder}/model.keras"), hvd.load_model(f"{folder}/model.keras")
    bare = hvd.load_model(f"{folder}/model.keras", compile=False)
rise = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1)
fall = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2)
rates = []
def noted(*_, **__):
    getattr(one, "jax_state_sync", dict)()
    rates.append(float(one.optimizer.learning_rate.value))

note = keras.callbacks.LambdaCallback(on_train_batch_end=noted)
for one in (ours, again):
    one.fit(x[share], y[share], batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[rise, fall, note])
result += [flat(ours), flat(again), type(plain.optimizer) is keras.optimizers.SGD, rates, flat(bare) == result[0]]

rates, one = [], ours
alone = hvd.callbacks.LearningRateWarmupCallback(0.1, 2, False)
one.fit(x[share], y[share], batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[alone, note])
result.append(rates)
wanted = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, momentum_correction=True)
try:
    one.fit(x[share], y[share], batch_size=8, verbose=0, callbacks=[wanted])
except hvd.UsageError as error:
    result.append(str(error))
"""


@pytest.mark.stress
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_keras_model_fits_as_in_one_process(backend: str) -> None:
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    first, second = run_codes([PRELUDE + FITS.replace("BACKEND,", f"{backend!r},", 1) + EPILOGUE] * 2)
    assert first[0] == second[0]
    assert np.allclose(first[0], first[1], rtol=CLOSE, atol=CLOSE)
    assert first[2] == second[2] == pytest.approx(first[3], rel=CLOSE)
    # Saved under Keras's own name; loaded, it goes on as the one that was not; the rate rises, and falls.
    assert first[4] == first[5] == second[4] == second[5] != first[0]
    assert first[6] is True
    assert first[7] == pytest.approx([0.0625, 0.075, 0.0875, 0.1, 0.05, 0.05] * 2)
    assert first[8] is True
    # Horovod's warm-up: its last batch has the whole rate, which stays.
    assert first[9] == pytest.approx([0.0625, 0.075, 0.0875, 0.1, 0.1, 0.1])
    assert first[10].startswith("momentum_correction=True cannot be had")


def test_a_group_for_a_name_is_refused() -> None:
    """It would average over all ranks."""
    optimizer, group = object(), object()
    with pytest.raises(
        UsageError, match="a text for name, its second argument, and found object: give a group as group="
    ):
        DistributedOptimizer(optimizer, group)  # pyright: ignore[reportArgumentType]


ARGUMENTS = """
os.environ["KERAS_BACKEND"] = "jax"
import keras
import shoal.keras as hvd
hvd.world = lambda: group

def weights(optimizer, x, y, batch):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([each.ravel() for each in model.get_weights()]).tolist()

draw = np.random.default_rng(0)
x, y = draw.standard_normal((32, 6)).astype("float32"), draw.standard_normal((32, 1)).astype("float32")
share = slice(group.rank * 16, (group.rank + 1) * 16)
sgd = keras.optimizers.SGD
mean, total = weights(sgd(0.1), x, y, 32), weights(sgd(0.2), x, y, 32)

def ours(batch=16, **named):
    return weights(hvd.DistributedOptimizer(sgd(0.1), **named), x[share], y[share], batch)

pairs = {
    "pieces": (ours(name="mine", device_dense="", sparse_as_dense=True, num_groups=2), mean),
    "sum": (ours(op=hvd.Sum), total),
    "passes": (ours(8, backward_passes_per_step=2, average_aggregated_gradients=True), mean),
    "short": (ours(compression=hvd.Compression.fp16), mean),
}
refused = []
for named in ({"backward_passes_per_step": 2}, {"colour": 1}):
    try:
        hvd.DistributedOptimizer(sgd(0.1), **named)
    except hvd.UsageError as error:
        refused.append(str(error))
result = [pairs, refused]
"""


@pytest.mark.stress
def test_horovods_arguments_do_what_they_say() -> None:
    for package in ("keras", "jax"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    first, second = run_codes([PRELUDE + ARGUMENTS + EPILOGUE] * 2)
    assert first == second
    (pairs, refused), close = first, {"short": 1e-3}
    for name, (ours, wanted) in pairs.items():
        assert np.allclose(ours, wanted, atol=close.get(name, CLOSE)), name
        assert (name == "short") == (not np.allclose(ours, wanted, atol=1e-6))
    assert refused[0].startswith("Keras averages the gradients of 2 passes")
    assert refused[1] == "DistributedOptimizer knows no colour: leave it out"


SPARSE = """
os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
import keras, tensorflow as tf
import shoal.keras as hvd
hvd.world = lambda: group
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
flat = lambda model: np.concatenate([each.ravel() for each in model.get_weights()]).tolist()

def model(optimizer, **named):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((5,), dtype="int32"), keras.layers.Embedding(50, 8), keras.layers.Flatten(),
              keras.layers.Dense(4)]
    found = keras.Sequential(layers)
    found.compile(optimizer=optimizer, loss=loss, **named)
    return found

draw = np.random.default_rng(0)
x, y = draw.integers(0, 50, (32, 5)), draw.integers(0, 4, 32)
share = slice(group.rank * 16, (group.rank + 1) * 16)
adam = keras.optimizers.Adam
result = []
for named in ({}, {"sparse_as_dense": True}):
    ours = model(hvd.DistributedOptimizer(adam(0.01), **named))
    ours.fit(x[share], y[share], batch_size=16, epochs=4, shuffle=False, verbose=0)
    result.append(flat(ours))
alone = model(adam(0.01))
alone.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0)
result.append(flat(alone))

ours, sgd, seen = model("sgd"), keras.optimizers.SGD(0.1), []

@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        value = loss(y, ours(x))
    gradients = hvd.all_reduce_gradients(tape.gradient(value, ours.trainable_variables))
    seen.append(type(gradients[0]).__name__)
    sgd.apply_gradients(zip(gradients, ours.trainable_variables))

for _ in range(3):
    step(tf.constant(x[share][: 16 - 4 * group.rank]), tf.constant(y[share][: 16 - 4 * group.rank]))
result += [flat(ours), seen]
compiled = model(hvd.DistributedOptimizer(sgd), jit_compile=True)
try:
    compiled.fit(x[share], y[share], verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
except hvd.UsageError as error:
    result.append(str(error))
"""


@pytest.mark.stress
def test_sparse_gradients_of_tensorflow_train_as_in_one_process() -> None:
    """Adam of Keras squares each row of a sparse gradient by itself: made dense, it takes other steps. Ranks may have
    other numbers of rows. What XLA would have to compile is refused.
    """
    for package in ("keras", "tensorflow"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    first, second = run_codes([PRELUDE + SPARSE + EPILOGUE] * 2)
    assert first == second
    ours, dense, alone, by_tape, seen, refused = first
    assert np.allclose(ours, alone, atol=CLOSE)
    assert not np.allclose(dense, alone, atol=CLOSE)
    assert np.isfinite(by_tape).all()
    assert seen == ["IndexedSlices"]
    assert refused.startswith("compile(jit_compile=True): XLA compiles no exchange between ranks on TensorFlow")
