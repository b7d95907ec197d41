"""An optimizer over some of the parameters of another: the same options and the same state, to step them alone."""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch
from torch.nn import Parameter


def part_of(optimizer: torch.optim.Optimizer, parameters: Collection[Parameter]) -> torch.optim.Optimizer:
    """What it writes into its state stands in that of `optimizer`, too. The learning rate is its own."""
    wanted = {id(parameter) for parameter in parameters}
    part = copy.copy(optimizer)
    groups = [{**g, "params": [p for p in g["params"] if id(p) in wanted]} for g in optimizer.param_groups]
    part.param_groups = [group for group in groups if group["params"]]
    return part
