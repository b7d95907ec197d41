"""What one rank computes in a second: matrix products, the operators of an eager GPT, and copies.

All ranks measure at the same time, and the mean over them counts. The time of a call is a mean over a window of work;
the fastest of a few windows counts, which no other program has slowed down. Operators are measured in a chain of
`DEPTH`, as layers follow each other: the forward takes fresh memory from the system and the backward gives it back,
which on a CPU costs as much as the arithmetic of a short operator. The sizes m, n and k of an operator are

    linear      [m, k] x [k, n], with the gradients of input and weight       norm        x + RMSNorm(x), [m, n]
    gate        silu(x) * y, [m, n]         gelu        gelu(x), [m, n]       rotary      turned features, [m, n]
    attention   m heads of n tokens, k features, causal                       embedding   rows of n numbers for m tokens
    copy        [m, n] in another order     loss        cross-entropy of [m, n]
    adam        fused AdamW's step over m numbers, no backward
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.bench.groups import repeat, slowest
from shoal.bench.ranks import rank_folder
from shoal.bench.training_job import corpus_file, small_gpt_run_file, start_alone
from shoal.comm.collective import Collective
from shoal.data.config import BatchConfig
from shoal.models.config import GPTConfig
from shoal.models.layers import rotated, rotations
from shoal.runfile.run_file import RunFile

DEPTH = 4
WARM_UP, WINDOWS, WINDOW_S = 2, 3, 0.004
ROWS = (64, 256, 1024, 4096)
COLUMNS = (32, 128, 512)
CLASSES = (64, 256, 1024)
HEADS, TOKENS, HEAD_SIZES = (4, 32), (32, 128, 512), (32, 64)
NUMBERS = (1 << 12, 1 << 16, 1 << 20)
HEAD_SIZE = 32
"""Of rotary positions, whose time depends only on how many numbers there are."""

PRODUCT_TOKENS = (64, 256, 1024, 4096)
FEATURES = (128, 512, 1024)
LARGEST_PRODUCT = 4096 * 512**2
FEWEST_CALLS, CALL_WINDOW_S = 3, 0.01
COPY_BYTES = 16 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Size = tuple[int, int, int]
Once = Callable[[], tuple[float, float]]
"""(forward, backward) seconds of one layer, measured once."""


def product_times(world: Collective) -> Iterator[dict[str, Any]]:
    """A row of the calibration for each matrix product, in FLOP/s."""
    sizes = itertools.product(PRODUCT_TOKENS, itertools.product(FEATURES, FEATURES))
    for (name, dtype), (m, (n, k)) in itertools.product(DTYPES.items(), sizes):
        if m * n * k > LARGEST_PRODUCT:
            continue
        a, b, out = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype), torch.empty(m, n, dtype=dtype)
        world.barrier().wait()
        (seconds,) = rank_mean(world, [_fastest_s(partial(torch.mm, a, b, out=out))])
        yield {"dtype": name, "m": m, "n": n, "k": k, "ranks": world.size, "flops_s": 2 * m * n * k / seconds}


def operator_times(world: Collective) -> Iterator[dict[str, Any]]:
    """A row of the calibration for each operator and size in float32, in seconds."""
    for point in points(torch.float32):
        world.barrier().wait()
        forward_s, backward_s = rank_mean(world, _windowed(point.build()))
        for m, n, k in point.sizes:
            yield {
                "operator": point.operator, "dtype": "float32", "m": m, "n": n, "k": k, "ranks": world.size,
                "forward_s": forward_s, "backward_s": backward_s,
            }  # fmt: skip


def copy_bytes_s(world: Collective) -> float:
    """Bytes read and written in a second by a copy that fits in no cache."""
    source, target = torch.zeros(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    world.barrier().wait()
    return rank_mean(world, [2 * COPY_BYTES / _fastest_s(partial(target.copy_, source))])[0]


def rank_mean(world: Collective, values: Sequence[float]) -> list[float]:
    """Each of `values` in the mean over the ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    world.all_reduce(total).wait()
    return (total / world.size).tolist()


def _fastest_s(call: Callable[[], object]) -> float:
    call()
    return min(_mean_s(call) for _ in range(WINDOWS))


def _mean_s(call: Callable[[], object]) -> float:
    begin_s, count = time.perf_counter(), 0
    while count < FEWEST_CALLS or time.perf_counter() - begin_s < CALL_WINDOW_S:
        call()
        count += 1
    return (time.perf_counter() - begin_s) / count


@dataclass(frozen=True)
class Point:
    """One operator. `build` makes its data; the seconds of what it returns hold for all of `sizes`."""

    operator: str
    sizes: tuple[Size, ...]
    build: Callable[[], Once]


def points(dtype: torch.dtype) -> Iterator[Point]:
    """All operators and sizes, in an order that is the same on every rank."""
    for m, (n, k) in itertools.product(ROWS, itertools.combinations_with_replacement(COLUMNS, 2)):
        yield Point("linear", tuple({(m, n, k), (m, k, n)}), lambda m=m, n=n, k=k: _linear(m, n, k, dtype))
    for m, n in itertools.product(ROWS, COLUMNS):
        for name in ("norm", "gate", "gelu", "rotary", "copy"):
            yield Point(name, ((m, n, 1),), lambda name=name, m=m, n=n: _elementwise(name, m, n, dtype))
        yield Point("embedding", ((m, n, 1),), lambda m=m, n=n: _embedding(m, n, dtype))
    for m, n in itertools.product(ROWS, CLASSES):
        yield Point("loss", ((m, n, 1),), lambda m=m, n=n: _loss(m, n))
    for m, n, k in itertools.product(HEADS, TOKENS, HEAD_SIZES):
        yield Point("attention", ((m, n, k),), lambda m=m, n=n, k=k: _attention(m, n, k, dtype))
    for m in NUMBERS:
        yield Point("adam", ((m, 1, 1),), lambda m=m: _adam(m))


def _linear(m: int, n: int, k: int, dtype: torch.dtype) -> Once:
    """Layers from k to n features and back in turn, so that they can follow each other."""
    weights = [_leaf(*((n, k) if i % 2 == 0 else (k, n)), dtype=dtype) for i in range(DEPTH)]
    return _timed(lambda: _leaf(m, k, dtype=dtype), [lambda x, w=w: F.linear(x, w) for w in weights], weights)


def _elementwise(name: str, m: int, n: int, dtype: torch.dtype) -> Once:
    weight, others = _leaf(n, dtype=dtype), [_leaf(m, n, dtype=dtype) for _ in range(DEPTH)]
    factors = rotations(torch.arange(m), head_size=HEAD_SIZE, base=1e4)
    layers: dict[str, Callable[[int], Callable[[Tensor], Tensor]]] = {
        "norm": lambda i: lambda x: x + F.rms_norm(x, (n,), weight, 1e-5),
        "gate": lambda i: lambda x: F.silu(x) * others[i],
        "gelu": lambda i: F.gelu,
        "rotary": lambda i: lambda x: rotated(x.unflatten(-1, (-1, HEAD_SIZE)), factors).flatten(-2),
        "copy": lambda i: lambda x: x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1),
    }
    return _timed(lambda: _leaf(m, n, dtype=dtype), [layers[name](i) for i in range(DEPTH)], [weight, *others])


def _attention(m: int, n: int, k: int, dtype: torch.dtype) -> Once:
    """Query, key and value come from one projection's layout, [tokens, heads, features], as in a model."""
    heads = 4
    keys = [_leaf(m // heads, n, heads, k, dtype=dtype) for _ in range(2 * DEPTH)]

    def layer(i: int) -> Callable[[Tensor], Tensor]:
        def attend(x: Tensor) -> Tensor:
            q, key, value = (t.transpose(1, 2) for t in (x, keys[2 * i], keys[2 * i + 1]))
            return F.scaled_dot_product_attention(q, key, value, is_causal=True).transpose(1, 2).contiguous()

        return attend

    return _timed(lambda: _leaf(m // heads, n, heads, k, dtype=dtype), [layer(i) for i in range(DEPTH)], keys)


def _embedding(m: int, n: int, dtype: torch.dtype) -> Once:
    tokens = torch.randint(0, 256, (m,))
    return _timed(lambda: _leaf(256, n, dtype=dtype), [lambda x: F.embedding(tokens, x)], [])


def _loss(m: int, n: int) -> Once:
    targets = torch.randint(0, n, (m,))
    return _timed(lambda: _leaf(m, n), [lambda x: F.cross_entropy(x, targets, reduction="none")], [])


def _adam(m: int) -> Once:
    """Over parameters of up to 2^16 numbers each, as the matrices of a small model have."""
    parameters = [_leaf(min(m, 1 << 16)) for _ in range(max(1, m >> 16))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    return lambda: (_spent(optimizer.step), 0.0)


def _timed(start: Callable[[], Tensor], layers: Sequence[Callable[[Tensor], Tensor]], leaves: Sequence[Tensor]) -> Once:
    """(forward, backward) seconds of one layer."""

    def once() -> tuple[float, float]:
        for leaf in leaves:
            leaf.grad = None
        x = first = start()
        begin_s = time.perf_counter()
        for layer in layers:
            x = layer(x)
        middle_s = time.perf_counter()
        gradient = torch.ones_like(x)
        backward_begin_s = time.perf_counter()
        torch.autograd.backward(x, gradient)
        end_s = time.perf_counter()
        del x, first
        return (middle_s - begin_s) / len(layers), (end_s - backward_begin_s) / len(layers)

    return once


def _windowed(once: Once) -> tuple[float, float]:
    """The fastest of a few windows, after a warm-up."""
    for _ in range(WARM_UP):
        once()
    return min((_window(once) for _ in range(WINDOWS)), key=sum)


def _window(once: Once) -> tuple[float, float]:
    forward = backward = 0.0
    count = 0
    while count < FEWEST_CALLS or forward + backward < WINDOW_S:
        spent = once()
        forward, backward, count = forward + spent[0], backward + spent[1], count + 1
    return forward / count, backward / count


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def _spent(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


# What a training step costs beside its operators: Python, other ranks on the same cores, and waiting for them.
#
# Python, hooks and the loop, by step, by microbatch and by layer: measured on GPTs so small that their operators, at
# the smallest sizes that `operator_times` measures, are easily subtracted. They have few and many layers, few and many
# microbatches; `cost.operators` separates the three parts.
#
# Contention: ranks that compute at the same time lose more than their share of the cores, because every change of ranks
# fills the caches anew and the memory's rate is shared. Windows of single operators are as short as a time slice and
# miss that. So all ranks take the same step of a small GPT at once, without talking, and the slowest rank counts.
#
# Waiting: pieces of computation of several lengths, with an all-reduce after each and without.


TINY_SEQUENCE, TINY_WIDTH = 64, 32
TINY_SIZES = ((1, 1), (5, 1), (1, 5))
"""Layers and microbatches."""
TINY_WARM_UP, TINY_STEPS = 5, 30

CROWD_SAMPLES, CROWD_SEQUENCE = 4, 128
CROWD_MODEL = GPTConfig(
    layers=4, width=128, heads=4, feed_forward="swiglu", feed_forward_width=384, vocabulary=256, tied=True
)
CROWD_WARM_UP, CROWD_WINDOWS, CROWD_STEPS = 2, 5, 6

PIECE_WIDTH, PIECE_INNER = 128, 384
PIECES = ((64, 1), (256, 2), (1024, 2), (1024, 8))
"""Tokens, and how many feed-forwards of them: from a tenth of a millisecond to some twenty."""
PIECE_WINDOW_S, PIECE_REPEATS = 0.1, 5
MANY_BYTES = 1 << 20


def host_times() -> Iterator[dict[str, Any]]:
    """A row of the calibration for each tiny GPT: m layers, n microbatches, and the seconds of its step."""
    with rank_folder() as folder:
        corpus = corpus_file(folder)
        for layers, microbatches in TINY_SIZES:
            seconds = _tiny_step_s(folder, corpus, layers, microbatches)
            yield {
                "operator": "step", "dtype": "float32", "m": layers, "n": microbatches, "k": 1, "ranks": 1,
                "forward_s": seconds, "backward_s": 0.0,
            }  # fmt: skip


def crowded_step_s(world: Collective) -> float:
    """Seconds of the small GPT's step on the slowest rank, in the fastest of a few windows; the same on all ranks."""
    with rank_folder() as folder, ExitStack() as stack:
        training = start_alone(crowd_run(folder, corpus_file(folder)), stack)
        repeat(training.take_step, CROWD_WARM_UP)
        windows = [slowest(lambda: repeat(training.take_step, CROWD_STEPS), world) for _ in range(CROWD_WINDOWS)]
    return min(windows) / CROWD_STEPS


def crowd_run(folder: Path, corpus: Path) -> RunFile:
    """The run of the small GPT."""
    return small_gpt_run_file(
        folder, corpus, CROWD_MODEL, BatchConfig(global_samples=CROWD_SAMPLES, sequence=CROWD_SEQUENCE)
    )


def wait_times(world: Collective) -> Iterator[dict[str, Any]]:
    """A row of the calibration for each piece of computation, the same on all ranks.

    `wait_s` is what an all-reduce of a few numbers adds to the piece, `byte_s` what each byte of a larger one adds. Of
    a few windows the fastest counts.
    """
    few, many = torch.zeros(8), torch.zeros(MANY_BYTES // 4)
    for tokens, layers in PIECES:
        work = _piece(tokens, layers)
        count = max(3, int(PIECE_WINDOW_S / _mean_of_ranks_s(world, work, 3)))
        sides = (work, _then_all_reduce(work, world, few), _then_all_reduce(work, world, many))
        times = [[_mean_of_ranks_s(world, side, count) for side in sides] for _ in range(PIECE_REPEATS)]
        piece_s, few_s, many_s = map(min, zip(*times, strict=True))
        yield {
            "ranks": world.size,
            "piece_s": piece_s,
            "wait_s": max(0.0, few_s - piece_s),
            "byte_s": max(0.0, (many_s - few_s) / MANY_BYTES),
        }


def _tiny_step_s(folder: Path, corpus: Path, layers: int, microbatches: int) -> float:
    model = GPTConfig(
        layers=layers, width=TINY_WIDTH, heads=4, feed_forward="swiglu", feed_forward_width=TINY_WIDTH, vocabulary=256,
        tied=True,
    )  # fmt: skip
    batch = BatchConfig(global_samples=microbatches, micro_samples=1, sequence=TINY_SEQUENCE)
    with ExitStack() as stack:
        training, times = start_alone(small_gpt_run_file(folder, corpus, model, batch), stack), []
        for _ in range(TINY_WARM_UP + TINY_STEPS):
            begin_s = time.perf_counter()
            training.take_step()
            times.append(time.perf_counter() - begin_s)
    return statistics.median(times[TINY_WARM_UP:])


def _piece(tokens: int, layers: int) -> Callable[[], None]:
    x, down = torch.randn(tokens, PIECE_WIDTH), torch.randn(PIECE_WIDTH, PIECE_INNER)
    up = torch.randn(PIECE_INNER, PIECE_WIDTH)

    def work() -> None:
        for _ in range(layers):
            y = F.linear(F.silu(F.linear(x, up)), down)
            F.rms_norm(y + x, (PIECE_WIDTH,))

    return work


def _then_all_reduce(work: Callable[[], None], world: Collective, numbers: Tensor) -> Callable[[], None]:
    def both() -> None:
        work()
        world.all_reduce(numbers).wait()

    return both


def _mean_of_ranks_s(world: Collective, work: Callable[[], None], count: int) -> float:
    """Seconds of one of `count` calls, in the mean over the ranks, which begin together."""
    world.barrier().wait()
    begin_s = time.perf_counter()
    repeat(work, count)
    return rank_mean(world, [(time.perf_counter() - begin_s) / count])[0]
