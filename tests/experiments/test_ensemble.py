"""An ensemble predicts by its members' mean, and is at least as good as they are in the mean."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch.nn import functional as F

from shoal.experiments.ensemble import combined
from tests.cli.project import project


def test_the_mean_probability_is_predicted_and_loses_no_more_than_the_mean_member() -> None:
    """What comes out are logarithms of the mean of the softmaxes; the loss is convex, so the ensemble's is at most the
    members' mean, by any logits."""
    draw = torch.Generator().manual_seed(1)
    logits = [3 * torch.randn(50, 7, generator=draw, dtype=torch.float64) for _ in range(4)]
    targets = torch.randint(7, (50,), generator=draw)
    together = combined(logits, classes=True)
    mean = sum(torch.softmax(one, -1) for one in logits) / 4
    torch.testing.assert_close(together.exp(), mean)
    assert F.cross_entropy(together, targets) < fmean(float(F.cross_entropy(one, targets)) for one in logits)
    torch.testing.assert_close(combined(logits, classes=False), sum(logits) / 4)


@pytest.mark.stress
def test_members_are_trained_with_their_seeds_and_evaluated_together(tmp_path: Path) -> None:
    """Three members differ; each is evaluated as `shoal evaluate` does; a second call trains none of them again."""
    own = project(tmp_path)
    command = ("ensemble", "run.toml", "run.processes=1", "--members", "3", "--parallel", "2", "--json")
    done = own.shoal(*command, timeout_s=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    losses = [member["loss/eval"] for member in found["members"]]
    assert len(set(losses)) == 3
    assert found["ensemble"]["loss/eval"] <= fmean(losses)
    assert set(found["ensemble"]) == {"loss/eval", "accuracy/eval"}
    alone = own.shoal("evaluate", found["directories"][1], "--json")
    assert json.loads(alone.stdout)["loss/eval"] == pytest.approx(losses[1], rel=1e-6)
    again = own.shoal(*command, timeout_s=180)
    assert json.loads(again.stdout) == found
    assert "starts" not in again.stderr
