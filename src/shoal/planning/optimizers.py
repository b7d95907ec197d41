"""What another optimizer would change in a plan: moments in 8 bits in the place of AdamW's."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import msgspec

from shoal import units
from shoal.errors import LayoutError
from shoal.optim.config import in_8_bits
from shoal.planner.explain.text import Change
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import Found, search
from shoal.planning.plan_file import runnable
from shoal.planning.stack import stack_of
from shoal.runfile.run_file import RunFile


def with_optimizer(predictor: Predictor, run_file: RunFile) -> Predictor:
    """The same with what the optimizer of `run_file` keeps and moves."""
    stack, other = predictor.stack, stack_of(run_file, predictor.cluster)
    kept = other.state
    state = replace(stack.state, optimizer=kept.optimizer, saved=kept.saved, streamed_bytes=kept.streamed_bytes)
    if state == stack.state and other.update_bytes == stack.update_bytes:
        return predictor
    changed = replace(stack, state=state, update_bytes=other.update_bytes, state_home=other.state_home)
    return predictor.on(predictor.cluster, measured=predictor.measured, stack=changed)


def _in_8_bits(run_file: RunFile, predictor: Predictor) -> tuple[str, Predictor] | None:
    """The key that brings moments to 8 bits, and what prices it; None where they cannot be, or are."""
    optimizer = in_8_bits(run_file.optimizer)
    if optimizer is None:
        return None
    changed = msgspec.structs.replace(run_file, optimizer=optimizer)
    return f'optimizer.kind = "{optimizer.variant}"', with_optimizer(predictor, changed)


def search_with(run_file: RunFile, predictor: Predictor, allowed: Allowed, *, keep: int) -> Found:
    """The fastest plans of a run file. Raises `LayoutError` where nothing fits, with what would fit with moments in 8
    bits.
    """
    legal = runnable(run_file, predictor.cluster)
    try:
        return search(predictor, allowed, keep=keep, legal=legal)
    except LayoutError as error:
        other, best = _in_8_bits(run_file, predictor), None
        with contextlib.suppress(LayoutError):
            best = search(other[1], allowed, keep=1, legal=legal).best[0] if other else None
        if other is None or best is None:
            raise
        size = units.memory_size(best.memory_bytes)
        raise LayoutError(f"{error}; with {other[0]}, {best.plan.describe()} fits in {size}") from error


def optimizer_changes(run_file: RunFile, predictor: Predictor, best: Prediction) -> list[Change]:
    """Moments in 8 bits, as a change of the best plan."""
    other = _in_8_bits(run_file, predictor)
    if other is None:
        return []
    one = other[1].predict(best.plan)
    caveat = "moments are rounded to 8 bits"
    return [Change(what=other[0], step_s=one.step_s, memory_bytes=one.memory_bytes, fits=one.fits, caveat=caveat)]
