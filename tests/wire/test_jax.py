"""JAX ranks train as one process does on the whole batch, in a loop and under `jit`, without torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.wire.processes import run

pytest.importorskip("jax", reason="of JAX")
CLOSE = 1e-5  # float32

TRAINS = """
import jax, jax.numpy as jnp, sys
import shoal.jax

def loss(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)

draw = np.random.default_rng(0)
w, v = draw.standard_normal((6, 8)), draw.standard_normal((8, 1))
start = {"w": jnp.asarray(w, jnp.float32) + group.rank, "v": jnp.asarray(v, jnp.float32)}
x, y = draw.standard_normal((16, 6)).astype(np.float32), draw.standard_normal((16, 1)).astype(np.float32)
share = slice(group.rank * 16 // group.size, (group.rank + 1) * 16 // group.size)

def step(p, x, y):
    g = shoal.jax.all_reduce_gradients(jax.grad(loss)(p, x, y), group)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g)

found = []
for each in (step, jax.jit(step)):
    p = shoal.jax.broadcast(start, group)
    for _ in range(5):
        p = each(p, x[share], y[share])
    found.append([np.asarray(p["w"]).tolist(), np.asarray(p["v"]).tolist()])
p = {"w": jnp.asarray(w, jnp.float32), "v": jnp.asarray(v, jnp.float32)}
for _ in range(5):
    p = jax.tree.map(lambda a, b: a - 0.1 * b, p, jax.grad(loss)(p, x, y))
alone = [np.asarray(p["w"]).tolist(), np.asarray(p["v"]).tolist()]
half = shoal.jax.all_reduce_gradients({"a": jnp.ones(3, jnp.bfloat16), "b": jnp.arange(2)}, group, op="sum")
kinds = [str(half["a"].dtype), half["b"].tolist()]
result = {"ranks": found, "alone": alone, "kinds": kinds}
"""


@pytest.mark.slow
def test_ranks_train_as_one_process_does() -> None:
    first, second = run(2, TRAINS)
    assert first == second
    for trained in first["ranks"]:
        for ours, alone in zip(trained, first["alone"], strict=True):
            assert np.allclose(ours, alone, rtol=CLOSE, atol=CLOSE)
    assert first["kinds"] == ["bfloat16", [0, 2]]
