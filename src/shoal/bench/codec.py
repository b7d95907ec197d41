"""`shoal bench codec`: what codecs cost and what they lose, beside a copy of memory and beside PyTorch's comm hooks.

Everything is done to one bucket of gradients on one thread: encoded, decoded, and compared with what went in. Rates
count the bucket's bytes in float32, whatever a codec makes of them; the median of some calls counts. A comm hook does
both at once, with an all-reduce of one rank between, which sends nothing.

With `--accuracy` two ranks train instead, with each codec (`codec_accuracy`).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.bench.codec_times import CODECS, WARM_UP, coding_times, keep_times, median_s, seconds_of
from shoal.bench.options import AsJson, names, numbers
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, Row, check, print_report
from shoal.codec.config import PowerSGDConfig

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.codec.codec import Codec, TensorPlace
    from shoal.launcher.environment import Place

HALF_OF_COPY = ("bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8")
COPY_BOUND, PASSES_BOUND, BACKWARD_BOUND = 0.5, 3.0, 0.10
WIDTH, BACKWARD_LAYERS, BACKWARD_TOKENS = 512, 8, 256
"""Of the GPT whose gradient is encoded; with so many layers it has 25 million parameters."""
LAYER = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
"""The matrices of one of its layers."""


def codec(
    codecs: Annotated[str, typer.Option(help="Which, with commas; default: all.")] = "",
    layers: Annotated[int, typer.Option(help="Layers of a GPT in the bucket, 3.1 million numbers each.", min=1)] = 2,
    calls: Annotated[int, typer.Option(help="Calls of which the median counts.", min=1)] = 9,
    accuracy: Annotated[
        str, typer.Option(help="Train instead: digits, gpt or gpt_plain_sgd. Losses with and without feedback.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of the trainings.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Steps of a training; 0: those of the recipe.", min=0)] = 0,
    keep: Annotated[bool, typer.Option(help="Add the seconds of coding to this machine's calibration.")] = True,
    as_json: AsJson = False,
) -> None:
    """Every codec: encode and decode rates, bytes, error; beside memcpy and PyTorch's comm hooks.

    Example: shoal bench codec --codecs int8,power_sgd
    """
    chosen = names(codecs, "--codecs", CODECS)
    if accuracy:
        from shoal.bench.codec_accuracy import TASKS, measure_accuracy

        task = names(accuracy, "--accuracy", TASKS)[0]
        several = numbers(seeds, "--seeds", least=0)
        if is_rank():
            run_as_rank(lambda place: measure_accuracy(place, task, chosen, seeds=several, steps=steps))
            return
        own = ["--accuracy", task, "--seeds", seeds, "--steps", str(steps)]
    else:
        if is_rank():
            run_as_rank(lambda place: measure(place, chosen, layers=layers, calls=calls))
            return
        own = ["--layers", str(layers), "--calls", str(calls)]
    command = ["shoal", "bench", "codec", "--codecs", ",".join(chosen), *own]
    result = on_ranks(command, processes=2 if accuracy else 1)
    print_report("codec", result, as_json=as_json)
    if keep and not accuracy:
        from shoal.planning.calibration import calibration_path

        path = calibration_path(os.environ)
        keep_times({row["codec"]: row for row in result["times"]}, CODECS, path)
        if not as_json:
            print(f"Kept for predictions: {path}")


def measure(place: Place, chosen: list[str], *, layers: int, calls: int) -> Result:
    """The rows of the chosen codecs, of the copy and of the comm hooks, and the promised figures."""
    import torch

    from shoal.bench.groups import join_default_group, join_store
    from shoal.bench.report import told
    from shoal.config.check import implementation_of

    places = _places(layers)
    numel = sum(a * b for a, b in LAYER) * layers
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    with ExitStack() as stack:
        join_default_group(place, join_store(place), stack)
        copy = torch.empty_like(gradient)
        copy_s = median_s(lambda: copy.copy_(gradient), calls)
        rows = [_row("memcpy", numel, copy_s, encode_s=copy_s, decode_s=copy_s, sent_bytes=4 * numel, error=0.0)]
        times: list[Row] = []
        for name in told(chosen, "codecs", total=len(chosen)):
            one = implementation_of(CODECS[name])(CODECS[name]).bound(places, key=1, rank=0, ranks=1)
            rows.append(_codec_row(name, one, gradient, copy_s, calls))
            encode_s, decode_s = coding_times(one, gradient, calls)
            times.append({"codec": name, "numbers": numel, "encode_s": encode_s, "decode_s": decode_s})
        rows += _hook_rows(gradient, places, copy_s, calls)
    checks = list(_checks({str(row["codec"]): row for row in rows}))
    if "power_sgd" in chosen:
        checks.append(check("power_sgd: encode over backward", _against_backward(calls), BACKWARD_BOUND, at_most=True))
    return {"rows": rows, "checks": checks, "times": times}


def _codec_row(name: str, one: Codec, gradient: Tensor, copy_s: float, calls: int) -> Row:
    import torch

    numel = gradient.numel()
    payload = one.encode(gradient, key=1)
    encode_s = median_s(lambda: one.encode(gradient, key=1), calls)
    decode_s = median_s(lambda: one.decode(payload, numel, key=1), calls)
    left = gradient - one.decode(payload, numel, key=1)
    error = float(torch.linalg.vector_norm(left) / torch.linalg.vector_norm(gradient))
    sent = one.wire_bytes(numel)
    return _row(name, numel, copy_s, encode_s=encode_s, decode_s=decode_s, sent_bytes=sent, error=error)


def _hook_rows(gradient: Tensor, places: list[TensorPlace], copy_s: float, calls: int) -> Iterator[Row]:
    """PyTorch's hooks on the same bucket; what a hook returns is what DDP would copy into the gradients."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    hooks: dict[str, Callable[[_Bucket], Tensor]] = {
        "PyTorch fp16_compress_hook": lambda bucket: default_hooks.fp16_compress_hook(None, bucket).wait(),  # pyright: ignore[reportArgumentType]
        "PyTorch powerSGD_hook": lambda bucket: powerSGD_hook.powerSGD_hook(state, bucket).wait(),  # pyright: ignore[reportArgumentType]
    }
    numel = gradient.numel()
    sent = {
        "PyTorch fp16_compress_hook": 2 * numel,
        "PyTorch powerSGD_hook": 4 * 4 * sum(sum(place.shape) for place in places),
    }
    for name, hook in hooks.items():
        for _ in range(WARM_UP):  # the first calls of PowerSGD's do not compress
            hook(_Bucket(gradient.clone(), places))
        state.error_dict.clear()
        found = hook(_Bucket(gradient.clone(), places))
        error = float(torch.linalg.vector_norm(gradient - found) / torch.linalg.vector_norm(gradient))
        buckets = [_Bucket(gradient.clone(), places) for _ in range(calls + 1)]
        both_s = median_s(lambda hook=hook, buckets=buckets: hook(buckets.pop()), calls, warm_up=1)
        yield _row(name, numel, copy_s, both_s=both_s, sent_bytes=sent[name], error=error)
    torch.distributed.barrier()  # Gloo's threads have let go of the hooks' callbacks, and the group may be destroyed


class _Bucket:
    """A gradient as DDP hands it to a hook."""

    def __init__(self, buffer: Tensor, places: list[TensorPlace]) -> None:
        self._buffer, self._places = buffer, places

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        sizes = [place.shape[0] * place.shape[1] for place in self._places]
        return [part.view(place.shape) for part, place in zip(self._buffer.split(sizes), self._places, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _row(
    name: str,
    numel: int,
    copy_s: float,
    *,
    encode_s: float | None = None,
    decode_s: float | None = None,
    both_s: float | None = None,
    sent_bytes: int,
    error: float,
) -> Row:
    """Rates in GB/s of float32; None where both were done at once."""
    gigabytes = 4e-9 * numel
    if both_s is None:
        both_s = (encode_s or 0.0) + (decode_s or 0.0)
    return {
        "codec": name,
        "encode_gb_s": encode_s and round(gigabytes / encode_s, 2),
        "decode_gb_s": decode_s and round(gigabytes / decode_s, 2),
        "both_gb_s": round(gigabytes / both_s, 2),
        "encode_of_memcpy": encode_s and round(copy_s / encode_s, 3),
        "decode_of_memcpy": decode_s and round(copy_s / decode_s, 3),
        "fewer_bytes": round(4 * numel / sent_bytes, 1),
        "error": round(error, 5),
    }


def _checks(rows: Mapping[str, Row]) -> Iterator[dict[str, object]]:
    for name in HALF_OF_COPY:
        for way in ("encode", "decode"):
            if name in rows:
                yield check(f"{name}: {way} of memcpy's rate", rows[name][f"{way}_of_memcpy"], COPY_BOUND)
    if "top_k_sampled" in rows:
        passes = 1 / rows["top_k_sampled"]["encode_of_memcpy"]
        yield check("top_k_sampled: encode in copies of the bucket", passes, PASSES_BOUND, at_most=True)


def _against_backward(calls: int) -> float:
    """What PowerSGD of rank 4 adds to the backward of a GPT of 25 million parameters: encoding over backward."""
    import torch

    from shoal.codec.power_sgd import PowerSGD
    from shoal.models.config import GPTConfig
    from shoal.models.gpt import GPT

    places = _places(BACKWARD_LAYERS)
    gradient = torch.randn(sum(a * b for a, b in LAYER) * BACKWARD_LAYERS)
    one = PowerSGD(PowerSGDConfig(rank=4)).bound(places, key=1, rank=0, ranks=1)
    config = GPTConfig(layers=BACKWARD_LAYERS, width=WIDTH, heads=8, feed_forward="gelu")
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(0, config.vocabulary, (2, BACKWARD_TOKENS // 2))
    backward, encode = [], []
    for _ in range(WARM_UP + calls):
        loss = model(tokens).float().logsumexp(-1).mean()
        backward.append(seconds_of(loss.backward))
        encode.append(seconds_of(lambda: one.encode(gradient)))
    return statistics.median(e / b for e, b in zip(encode[WARM_UP:], backward[WARM_UP:], strict=True))


def _places(layers: int) -> list[TensorPlace]:
    """Where the matrices of so many layers lie in one flat buffer."""
    from shoal.codec.codec import TensorPlace

    found, at = [], 0
    for layer in range(layers):
        for number, (rows, columns) in enumerate(LAYER):
            found.append(TensorPlace(f"{layer}.{number}", at, (rows, columns)))
            at += rows * columns
    return found
