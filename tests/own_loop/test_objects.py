"""Models and loops that another library has prepared: each is used as it is meant, or refused with a sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader

from shoal.errors import ConfigError, UsageError, UserCodeError
from shoal.own_loop.objects import (
    check_alone,
    is_compiled,
    objects_of,
    require_own_loop,
    scaler_in,
    unread_arguments,
    widened,
    with_precision,
)
from shoal.runfile.load import run_file_of


def given(model: nn.Module) -> dict:
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "state": {}}


@pytest.fixture
def connected() -> Iterator[None]:
    """A script that has called `init_process_group`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_that_the_script_has_connected(connected: None) -> None:
    with pytest.raises(UsageError, match="init_process_group before"):
        check_alone()


def test_ranks_that_nobody_has_connected() -> None:
    check_alone()


def test_a_model_in_distributed_data_parallel(connected: None) -> None:
    """Its own hooks would sum gradients a second time."""
    with pytest.raises(UserCodeError, match="wrapped in DistributedDataParallel"):
        objects_of(given(DistributedDataParallel(nn.Linear(2, 2))), None)


def test_a_model_in_data_parallel() -> None:
    with pytest.raises(UserCodeError, match="wrapped in DataParallel"):
        objects_of(given(DataParallel(nn.Linear(2, 2))), None)


def test_a_compiled_model_is_the_module_inside() -> None:
    """Its parameters have the names of the plain module."""
    plain = nn.Linear(2, 2)
    compiled = torch.compile(plain, backend="eager")
    assert objects_of(given(compiled), None).model is plain  # type: ignore[arg-type]
    assert is_compiled(compiled)
    assert is_compiled((nn.Linear(2, 2), compiled))
    assert not is_compiled(plain)
    plain.compile(backend="eager")
    assert is_compiled(plain)


def test_a_scaler_of_the_script() -> None:
    """Found is one that has scaled a loss, here or in a function that called this one; not one that is switched off,
    or was only made."""
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    off.scale(torch.ones(()))
    assert _found_from_below() is None
    scaler.scale(torch.ones(()))
    assert _found_from_below() is scaler


def _found_from_below() -> object:
    return scaler_in(sys._getframe())


def test_arguments_of_a_loader_that_are_not_read() -> None:
    """Each is said, and none where there is none."""
    loader = DataLoader([1, 2], generator=torch.Generator(), num_workers=2)  # type: ignore[arg-type]
    said = unread_arguments(loader)
    assert [sentence.split()[2] for sentence in said] == ["num_workers", "generator"]
    assert unread_arguments(DataLoader([1, 2])) == unread_arguments(None) == []  # type: ignore[arg-type]


def test_a_budget_is_not_kept_by_a_loop_of_ones_own() -> None:
    """Its ledger counts what the run's own steps compute."""
    given = {"kind": "python", "build": "given:object"}
    tables = {"run": {"name": "own", "steps": 1}, "model": given, "data": given, "batch": {"global_samples": 1}}
    run_file = run_file_of({**tables, "memory": {"budget": "1 GiB"}}, file="own")
    with pytest.raises(ConfigError, match=r'memory\.budget = "1 GiB" is kept by counting'):
        require_own_loop(run_file, model=None, optimizer=None)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"layout": {"sequence_parallel": True}}, "layout.sequence_parallel = true"),
        ({"sync": {"kind": "local", "period": 2}, "layout": {"replicate": 2}}, 'sync.kind = "local"'),
        ({"precision": {"kind": "bfloat16_params"}}, 'precision.kind = "bfloat16_params"'),
        ({"precision": {"kind": "float16"}}, 'precision.kind = "float16"'),
        ({"model": (nn.Linear(2, 2), nn.Linear(2, 2))}, "several models"),
        ({"optimizer": (None, None)}, "several optimizers"),
    ],
)
def test_what_a_split_loop_cannot_have(keys: dict, what: str) -> None:
    """One sentence, with the key that is in the way."""
    objects = {name: keys.pop(name, None) for name in ("model", "optimizer")}
    given = {"kind": "python", "build": "given:object"}
    tables = {"run": {"name": "own", "steps": 1}, "model": given, "data": given, "batch": {"global_samples": 2}}
    joined = {**tables, **{name: {**tables.get(name, {}), **table} for name, table in keys.items()}}
    run_file = run_file_of({**joined, "layout": {"tensor": 2, **keys.get("layout", {})}}, file="own")
    with pytest.raises(ConfigError, match=re.escape(f"layout.tensor = 2 with {what}: a script's own loop")):
        require_own_loop(run_file, **objects)


def test_a_model_keeps_its_type_where_nobody_says_another() -> None:
    """In float64 the run is; half-precision weights become float32 ones, and that is said."""
    given = {"kind": "python", "build": "given:object"}
    tables = {"run": {"name": "own", "steps": 1}, "model": given, "data": given, "batch": {"global_samples": 1}}
    double, half = nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16()
    assert with_precision(tables, (double, double))["precision"] == {"kind": "float64"}
    for other in (half, nn.Linear(2, 2), (double, half), lambda: double):
        assert with_precision(tables, other) is tables
    asked = {**tables, "precision": {"kind": "bfloat16_params"}}
    assert with_precision(asked, double) is asked
    assert "bfloat16 weights are float32 in this run" in widened(half, run_file_of(tables, file="own"))[0]
    assert widened(half, run_file_of(asked, file="own")) == widened(double, run_file_of(tables, file="own")) == []


class Scheduled:
    """Wraps an optimizer to set its rate, as older transformers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer = inner


class Lookahead(torch.optim.Optimizer):
    """Leaves out the `__init__` of its base class on purpose, as public ones do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state


@pytest.mark.parametrize(
    ("wrapped", "sentence"),
    [
        (lambda inner: None, "there is no optimizer: pass optimizer= to shoal.start"),
        (Scheduled, "hand over the one that it wraps, optimizer._optimizer, and go on to call this"),
        (lambda inner: "sgd", "the optimizer is of type str, which is no torch.optim.Optimizer"),
        (Lookahead, "Lookahead does not call the __init__ of torch.optim.Optimizer"),
    ],
)
def test_what_is_no_optimizer_of_pytorch_is_a_sentence(wrapped: Any, sentence: str) -> None:
    """And what to hand over in its place; also as one of several."""
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer in (wrapped(inner), (inner, wrapped(inner))):
        with pytest.raises(UserCodeError, match=re.escape(sentence)):
            objects_of({"model": model, "optimizer": optimizer, "state": {}}, None)
