"""The rules between synchronised batch norms and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.runfile.run_file import RunFile, synchronises_norms


def norm_refusal(run_file: RunFile) -> str | None:
    """One sentence if ranks cannot take statistics together in every forward."""
    if not synchronises_norms(run_file.model):
        return None
    found = next(_against_synchronised(run_file), None)
    return None if found is None else f'model.batch_norm = "synchronised" with {found[0]}: {found[1]}'


def _against_synchronised(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout, sync = run_file.layout, run_file.sync
    for axis in ("pipeline", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            why = "its ranks have to hold whole samples and all layers; use layout.replicate and layout.shard"
            yield f"layout.{axis} = {getattr(layout, axis)}", why
    if sync.replicas_are != "lockstep":
        why = 'replicas at different steps have no microbatch in common; set it to "allreduce"'
        yield f'sync.kind = "{sync.variant}"', why
    if run_file.sync.in_canonical_order:
        why = 'the samples of a microbatch follow the number of replicas; set model.batch_norm = "grouped"'
        yield 'sync.order = "canonical"', why
    if run_file.batch.division != "even":
        yield (
            f'batch.division = "{run_file.batch.division}"',
            "all ranks need as many microbatches; leave one of the two out",
        )
    if run_file.elastic is not None:
        why = 'the statistics follow the number of replicas, which changes; set model.batch_norm = "grouped"'
        yield "[elastic]", why
    if run_file.run.compile:
        yield run_file.run.compile_said, "a compiled forward holds no exchange between ranks; leave it out"
