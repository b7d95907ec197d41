"""What `run.compile` compiles computes what the plain model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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


def compiled(tables: dict[str, Any], what: bool | str) -> dict[str, Any]:
    return TABLES | tables | {"run": {"compile": what}}


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
