"""Elastic runs whose replicas are split inside: one process is lost, and with it its replica, and the others go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.elastic_runs import (
    gpt_project,
    memberships,
    rank_zero,
    replicas_of,
    start,
    to_the_end,
    undisturbed,
    wait_for_join,
)

LOSS_TOLERANCE = 1e-9
"""Relative, in float64 with SGD: another order of summation shows in the last digits alone."""
SPLITS = {
    "zero-3 and pipeline": "[layout]\nshard = 2\npipeline = 2\n[memory]\nzero = 3\n[pipeline]\nmicrobatches = 3\n",
    "zero-1": "[layout]\nshard = 2\n[memory]\nzero = 1\n",
    "tensor": "[layout]\ntensor = 2\n",
    "context": "[layout]\ncontext = 2\n",
}


@pytest.mark.stress
@pytest.mark.parametrize("split", SPLITS)
def test_a_replica_that_is_split_inside_is_lost_and_replaced(tmp_path: Path, split: str) -> None:
    """kill -9 of one of its ranks: the others of its replica end too, the other replica goes on in its processes,
    another joins with a copy of every part, and the losses are those of one process that nothing happens to."""
    own = gpt_project(tmp_path, SPLITS[split])
    plain = undisturbed(own)
    running = start(own)
    first = replicas_of(running)
    writer = rank_zero(pid for pids in first.values() for pid in pids)
    leader = next(slot for slot, pids in first.items() if writer in pids)
    other = 1 - leader
    os.kill(first[other][1], signal.SIGKILL)
    own.wait_for_text(r"of 2 replicas; ranks \d to \d lost after step")
    wait_for_join(own, r"2 of 2 replicas; .*ranks \d to \d joined after step")
    second = replicas_of(running)
    assert second[leader] == first[leader], "survivors were restarted"
    assert not set(second[other]) & set(first[other]), "a rank outlived its replica"
    os.kill(second[leader][0], signal.SIGKILL)
    own.wait_for_text(r"(?s)joined after step.*replicas; ranks 0 to \d lost after step")
    assert to_the_end(own, running) == 0, own.said()
    losses = own.losses()
    assert len(losses) >= len(plain) - 1, "the record of one step may die with rank 0, which was to write it"
    assert losses == pytest.approx({step: plain[step] for step in losses}, rel=LOSS_TOLERANCE)
    assert memberships(own)[0] == 2
    assert len(memberships(own)) >= 3
