"""Two checkpoints are the same when their tensors are, whatever wrote them."""

from __future__ import annotations

import pytest
import torch

from shoal.checkpoint.inspect import compare
from shoal.errors import UsageError
from shoal.topology.holding import boxes_of_run
from tests.checkpoint.cuts import targets
from tests.checkpoint.states import save, saver_for, state_of


def test_layouts_make_no_difference(tmp_path):
    """Other objects, equal tensors: nothing differs, a NaN included."""
    whole = state_of(1)
    whole["model/weight"][3, 3] = torch.nan
    weight = whole["model/weight"]
    cut = [box for start, stop in ((0, 1000), (1000, 2870)) for box in boxes_of_run((70, 41), start, stop)]
    save(saver_for(tmp_path / "whole"), 1, whole)
    saver = saver_for(tmp_path / "cut", split=True)
    saver.save(1, whole | {"model/weight": targets(weight, cut)}, {}, layout={})
    assert saver.wait()[0].committed
    found = compare(tmp_path / "whole", tmp_path / "cut")
    assert (found.same, found.differences) == (len(whole), [])


def test_each_difference_is_named_with_its_kind_and_size(tmp_path):
    """A value, a shape, a type, a name on either side, and a value that is not finite."""
    before, after = state_of(1), state_of(1)
    after["model/bias"][7] += 2
    after["model/weight"][0, 0] = torch.inf
    after["model/mask"] = torch.zeros(6, dtype=torch.bool)
    after["optimizer/moment"] = after["optimizer/moment"].float()
    after["model/new"] = after.pop("model/frozen")
    saver = saver_for(tmp_path)
    save(saver, 1, before)
    save(saver, 2, after)
    steps = tmp_path / "checkpoints"
    found = compare(steps / "step-00000001", steps / "step-00000002")
    assert (found.first_step, found.second_step, found.same) == (1, 2, 2)
    kinds = {difference.name: difference.kind for difference in found.differences}
    assert kinds == {
        "model/bias": "values",
        "model/weight": "values",
        "model/mask": "shape",
        "optimizer/moment": "type",
        "model/frozen": "only in the first",
        "model/new": "only in the second",
    }
    sizes = {difference.name: difference.max_abs for difference in found.differences}
    rounded = (before["optimizer/moment"] - before["optimizer/moment"].float().double()).abs().max()
    assert sizes["model/weight"] is None
    assert sizes["optimizer/moment"] == float(rounded)
    difference = (after["model/bias"].double() - before["model/bias"].double()).abs().max()
    assert sizes["model/bias"] == float(difference)


def test_without_a_checkpoint_there_is_nothing_to_compare(tmp_path):
    """The sentence names the folder."""
    save(saver_for(tmp_path / "a"), 1)
    with pytest.raises(UsageError, match="holds no checkpoint"):
        compare(tmp_path / "a", tmp_path / "b")
