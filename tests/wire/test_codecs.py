"""The wire's codecs give the bits of `shoal.codec`, and sums through them are close, with error feedback closer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.codec.config import BlockwiseConfig, CastConfig
from shoal.codec.quantise import Blockwise
from shoal.codec.quantise import Cast as TorchCast
from shoal.errors import UsageError
from shoal.wire import Cast, ErrorFeedback, Int8, TopK
from tests.wire.processes import run

SIZES = (1, 1023, 1024, 5000)


def vector(size: int) -> np.ndarray:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    x[::7] = 0
    return x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
def test_bits_are_those_of_the_codecs_for_torch(name: str, size: int) -> None:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 of NumPy is that of ml_dtypes")
    blockwise, x = Blockwise(BlockwiseConfig(bits=8, block=1024)), vector(size)
    oracle = blockwise if name == "int8" else TorchCast(CastConfig(dtype=name, block=1024))
    payload = oracle.encode(torch.from_numpy(x))
    ours = Int8() if name == "int8" else Cast(name)
    encoded = ours.encode(x)
    assert encoded.tobytes() == b"".join(bytes(field.view(torch.uint8).numpy()) for field in payload)
    decoded = oracle.decode(payload, size)
    assert np.array_equal(ours.decode(encoded, size, np.dtype(np.float32)), decoded.numpy())


def test_error_feedback_loses_nothing_in_the_long_run() -> None:
    """The sum of what was decoded differs from that of what was given by what is left alone."""
    codec, given, came = ErrorFeedback(TopK(0.1)), np.zeros(100), np.zeros(100)
    for step in range(50):
        x = np.random.default_rng(step).standard_normal(100)
        given += x
        came += codec.decode(codec.encode(x), 100, np.dtype(float))
    assert codec.lost is not None
    assert np.allclose(given - came, codec.lost)
    assert np.count_nonzero(TopK(0.1).decode(TopK(0.1).encode(given), 100, np.dtype(float))) == 10


def test_error_feedback_is_of_one_array() -> None:
    codec = ErrorFeedback(Int8())
    codec.encode(np.ones(4))
    with pytest.raises(UsageError, match="one for each array"):
        codec.encode(np.ones(5))


CODED = """
x = np.random.default_rng(group.rank).standard_normal(10_000).astype(np.float32)
exact = group.all_reduce(x, op="avg")
before = group.ledger.total().bytes_sent
coded = group.all_reduce(x, op="avg", codec=wire.Int8())
sent = group.ledger.total().bytes_sent - before
everyone = group.all_gather(coded)
result = [float(abs(coded - exact).max() / abs(exact).max()), sent, bool((everyone == everyone[0]).all())]
"""


def test_a_coded_sum_is_close_alike_on_all_ranks_and_counted() -> None:
    for error, sent, alike in run(2, CODED):
        assert 0 < error < 0.02
        assert sent == 10_000 + 4 * 10  # a byte a number and a scale a block
        assert alike
