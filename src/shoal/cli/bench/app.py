"""`shoal bench`: figures beside a peer's, measured in one run."""

from __future__ import annotations

import typer

from shoal.cli.bench import (
    check,
    checkpoint,
    comm,
    feed,
    layouts,
    link,
    memory,
    noise,
    pipeline,
    plan,
    products,
    programs,
    simulate,
    start,
    step,
    wire,
    zero,
)

app = typer.Typer(
    help="Benchmarks, each beside a peer in one run. They report, they do not judge: exit 0 even where a check fails.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("step")(step.step)
app.command("checkpoint")(checkpoint.checkpoint)
app.command("start")(start.start)
app.command("feed")(feed.feed)
app.command("zero")(zero.zero)
app.command("comm")(comm.comm)
app.command("wire")(wire.wire)
app.command("link")(link.link)
app.command("check")(check.check)
app.command("programs")(programs.programs)
app.command("memory")(memory.memory)
app.command("pipeline")(pipeline.pipeline)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("noise")(noise.noise)
app.command("products")(products.products)
app.command("layouts")(layouts.layouts)
