"""Every layout's code on tensors of a GPU: what `shoal verify` says of each, for `python -m benchmarks.gpu --layouts`.

Two ranks share the one GPU over Gloo (`run.share_gpus`): a test of the code, not of its speed, so several layouts are
verified at a time. The page is written anew whenever one has answered.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one rank": ("run.processes=1",),
    "replicated": ("layout.replicate=2",),
    "ZeRO-1": ("layout.shard=2", "memory.zero=1"),
    "ZeRO-2": ("layout.shard=2", "memory.zero=2"),
    "ZeRO-3": ("layout.shard=2", "memory.zero=3"),
    "ZeRO-3, masters": ("layout.shard=2", "memory.zero=3", "precision.kind=bfloat16_params"),
    "ZeRO-3, compiled blocks": ("layout.shard=2", "memory.zero=3", "run.compile=blocks"),
    "tensor": ("layout.tensor=2",),
    "tensor, sequence parallel": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "pipeline": ("layout.pipeline=2",),
    "context": ("layout.context=2",),
    "experts": ("layout.shard=2", "layout.expert=2", "memory.zero=1", "model.kind=moe", "model.experts=4"),
    "int8 gradients": ("layout.replicate=2", "codec.kind=blockwise"),
    "moments in 8 bits": ("layout.shard=2", "memory.zero=1", "optimizer.kind=adamw_8bit"),
    "local steps": ("layout.replicate=2", "sync.kind=local", "sync.period=2"),
    "bfloat16": ("layout.replicate=2", "precision.kind=bfloat16"),
}
RUN = """
[run]
name = "layouts"
steps = 10
[model]
kind = "gpt"
layers = 2
width = 64
heads = 4
vocabulary = 256
[data]
kind = "stdlib"
[batch]
global_samples = 8
sequence = 64
"""
LIMIT_S = 90.0
AT_A_TIME = 4
OVER = "not begun: the seconds of this table were over"


def write_page(file: Path, layouts: Mapping[str, tuple[str, ...]], *, card: str, device: str, end_s: float) -> None:
    """What `shoal verify` says of `layouts`, on the page `file`; none is begun after `end_s` of `time.monotonic`."""
    said = dict.fromkeys(layouts, OVER)

    def answer(keys: tuple[str, ...]) -> str:
        return OVER if time.monotonic() > end_s else verified(keys, device)

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        asked = {threads.submit(answer, keys): name for name, keys in layouts.items()}
        for done in as_completed(asked):
            said[asked[done]] = done.result()
            file.write_text(page(card, said))


def verified(keys: tuple[str, ...], device: str) -> str:
    """The last sentence of `shoal verify` of a small GPT under `keys`: that it is the same model, or why not."""
    shares = ("run.share_gpus=true", "wire.transport=gloo") if device == "cuda" else ()
    own = () if any(key.startswith("run.processes") for key in keys) else ("run.processes=2",)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        Path(folder, "run.toml").write_text(RUN)
        command = [sys.executable, "-m", "shoal", "verify", "run.toml", f"run.device={device}", *shares, *own, *keys]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env=_with_paths()
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {LIMIT_S:.0f} s"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}, and nothing said"


def _with_paths() -> dict[str, str]:
    """The environment, in which another folder finds the modules that this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)}


def page(card: str, said: Mapping[str, str]) -> str:
    """The table in Markdown."""
    head = (
        f"# Layouts on a GPU\n\nWritten by `make gpu` on {card}, torch {torch.__version__}: what `shoal verify` says "
        "of a small GPT on tensors of the GPU. Two ranks share it over Gloo (`run.share_gpus`), a test mode that shows "
        "whether a layout's code runs there and computes what one process computes, not how fast.\n\n"
        "| layout | keys | |\n|---|---|---|\n"
    )
    return head + "".join(f"| {name} | `{' '.join(LAYOUTS[name])}` | {what} |\n" for name, what in said.items())
