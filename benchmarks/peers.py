"""`python -m benchmarks.peers`: the picture of the README: steps of Shoal beside those of DDP, FSDP2 and DeepSpeed.

It runs `benchmarks.own_loop` and `benchmarks.zero`, which take turns within one process, and draws for each peer how
many steps Shoal makes in the time of a hundred of the peer's, with the 95 % bound. Peers that are not installed are
left out, and named.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.pictures import COLOURS, INK, decorate, new_panels, picture_path
from shoal.bench.report import Result, check, print_report

PEERS = {
    "ddp": "DDP",
    "fully_shard": "FSDP2 (fully_shard)",
    "accelerate": "Accelerate",
    "deepspeed_zero_1": "DeepSpeed, ZeRO-1",
    "deepspeed_zero_3": "DeepSpeed, ZeRO-3",
}


def peers(
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and step; a multiple of 128.", min=128)] = 256,
    pairs: Annotated[int, typer.Option(help="Turns of all sides.", min=6)] = 40,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Steps of Shoal beside DDP, FSDP2, Accelerate and DeepSpeed on two CPU ranks.

    Example: python -m benchmarks.peers --picture docs/benchmarks/peers.svg
    """
    picture = picture_path(picture)
    common = ["--tokens", str(tokens), "--pairs", str(pairs), "--json"]
    loops = _rows("benchmarks.own_loop", "--peers", "ddp,accelerate,deepspeed_zero_1,deepspeed_zero_3", *common)
    sharded = _rows("benchmarks.zero", *common)
    rows = [row for row in [*loops, *sharded] if row["peer"] in PEERS and row.get("stage") in (None, "zero_3")]
    checks = [check(f"against {PEERS[row['peer']]}, 95 % bound", row["ratio_lower_95"], 1.0) for row in rows]
    if picture is not None:
        draw(rows, picture, f"{tokens} tokens a rank")
    print_report("peers", Result(rows=rows, checks=checks), as_json=as_json)


def _rows(*command: str) -> list[dict[str, Any]]:
    """The rows of a benchmark, which says on standard error how far it is."""
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if not lines:
        raise typer.Exit(done.returncode or 1)
    return json.loads(lines[-1])["rows"]  # what peers print stands before it


def draw(rows: Sequence[dict[str, Any]], path: Path, load: str) -> None:
    """A bar for each peer: its steps in the time of a hundred of Shoal's."""
    figure, (axes,) = new_panels(1, 1, size_inches=(7.2, 0.9 + 0.42 * (len(rows) + 1)))
    named = [(PEERS[row["peer"]], 100 / row["ratio_median"], 100 / row["ratio_lower_95"]) for row in rows]
    named = [("Shoal", 100.0, 100.0), *sorted(named, key=lambda each: -each[1])]
    for place, (_, steps, bound) in enumerate(reversed(named)):
        own = place == len(named) - 1
        axes.barh(place, steps, height=0.62, color=COLOURS[1 if own else 0], label="Shoal" if own else None)
        if not own:
            axes.plot([steps, bound], [place, place], color=INK, linewidth=1.2, marker="|")
        axes.text(steps - 2, place, f"{steps:.0f}", ha="right", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(named)), [name for name, *_ in reversed(named)])
    where = f"{platform.processor() or platform.machine()}, {datetime.date.today().isoformat()}"
    decorate(axes, "Steps in the time of a hundred of Shoal's", x_label=f"2 CPU ranks, a GPT, {load}; {where}")
    legend = axes.get_legend()
    if legend is not None:
        legend.remove()
    figure.savefig(path)


if __name__ == "__main__":
    run(peers)
