"""What `run.compile` compiles computes what the plain model does."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from shoal.assembly.metering import CompileClock
from shoal.engine.compute import compile_blocks
from tests.ranks import TestPlace
from tests.sync.steps import opened
from tests.verification.layouts import GPT, corpus

STEPS = 3
NOISE = 1e-12
"""Relative, float64: a fused kernel adds in another order."""
TABLES: dict[str, Any] = {"model": GPT, "precision": {"kind": "float64"}}
ZERO_3 = {"layout": {"shard": 2}, "memory": {"zero": 3}}


def losses(place: TestPlace, folder: str, tables: dict[str, Any], stance: str) -> list[float]:
    """Of the first steps. Under the stance "force_eager" what would be compiled is called as it is."""
    run = opened(place, tables, folder, Path(folder) / "run", STEPS)
    with torch.compiler.set_stance(stance), run.feed() as feed:  # type: ignore[arg-type]
        found = [run.step(n, feed.next().microbatches, lr=1e-2).loss for n in range(1, STEPS + 1)]
    run.end()
    return found


def compiled(tables: dict[str, Any], what: bool | str, **options: Any) -> dict[str, Any]:
    return TABLES | tables | {"run": {"compile": what, **options}}


OPTIONS = ({"compile_mode": "reduce-overhead", "compile_dynamic": True}, {"compile_dynamic": False})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "tables", "what"), [(1, {}, "model"), (1, {}, "blocks"), (2, ZERO_3, "blocks")], ids=str
)
def test_what_is_compiled_is_called_where_the_plain_model_is(
    ranks: Any, tmp_path: Path, world: int, tables: dict[str, Any], what: str
) -> None:
    """The calls alone, without the compiler's minutes: gathers of ZeRO-3, hooks and the loss in their places."""
    corpus(tmp_path)
    folder = str(tmp_path)
    (plain, *_) = ranks(world, losses, folder, TABLES | tables, "default")
    (found, *_) = ranks(world, losses, folder, compiled(tables, what), "force_eager")
    assert found == pytest.approx(plain, rel=NOISE)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("world", "tables", "what"), [(1, {}, "model"), (1, {}, "blocks"), (2, ZERO_3, "blocks")], ids=str
)
def test_compiled_losses_are_those_of_the_plain_model(
    ranks: Any, tmp_path: Path, world: int, tables: dict[str, Any], what: str
) -> None:
    corpus(tmp_path)
    (plain, *_) = ranks(world, losses, str(tmp_path), TABLES | tables, "default")
    (found, *_) = ranks(world, losses, str(tmp_path), compiled(tables, what), "default", timeout_s=280.0)
    assert found == pytest.approx(plain, rel=NOISE)


@pytest.mark.stress
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_compiler_change_no_loss(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """On a CPU there are no CUDA graphs; that they compute the same is for `make gpu` to show."""
    corpus(tmp_path)
    (plain, *_) = ranks(1, losses, str(tmp_path), TABLES, "default")
    (found, *_) = ranks(1, losses, str(tmp_path), compiled({}, "blocks", **options), "default", timeout_s=280.0)
    assert found == pytest.approx(plain, rel=NOISE)


@pytest.mark.parametrize("what", ["model", "blocks"])
def test_the_compiler_is_given_what_the_run_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Every program of a run, that of the loss included."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    corpus(tmp_path)
    tables = compiled({}, what, compile_mode="max-autotune-no-cudagraphs", compile_dynamic=False)
    run = opened(TestPlace(0, 1, HashStore()), tables, str(tmp_path), tmp_path / "run", STEPS)
    run.end()
    assert len(given) > 1
    assert all(options == {"mode": "max-autotune-no-cudagraphs", "dynamic": False} for options in given)


@pytest.mark.slow
def test_the_compilers_seconds_are_counted_once() -> None:
    """Of each program, where it is made, until the run ends."""
    with ExitStack() as stack:
        clock = CompileClock(stack, compiles=True)
        assert (clock.sentence(), clock.take_figures()) == ("", {})
        program = torch.compile(lambda x: x + 1, backend="eager")
        program(torch.ones(3))
        program(torch.ones(3))
        assert clock.sentence().endswith("s, for 1 program")
        assert clock.take_figures()["time/compile"] > 0
        assert clock.take_figures() == {}
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(3))
    assert clock.take_figures() == {}


@pytest.mark.slow
def test_a_block_is_called_as_it_is_under_a_mode() -> None:
    """ZeRO-3 looks at a run's first forward by one, which a compiled program would not show."""
    block = torch.nn.Linear(2, 2)
    plain, called = block.forward, []
    block.forward = lambda x: called.append(torch.compiler.is_compiling()) or plain(x)  # type: ignore[method-assign]
    compile_blocks([block])
    with torch.overrides.BaseTorchFunctionMode():
        block(torch.ones(1, 2))
    assert called == [False]
