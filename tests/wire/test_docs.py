"""The blocks of docs/wire.md and docs/horovod.md run on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.horovod.test_horovod import CHANGED
from tests.wire.processes import EPILOGUE, POISON, run_codes

DOCS = Path(__file__).parents[2] / "docs"
IMPORTS = "import json\n"
JAX = """
import jax, jax.numpy as jnp
loss = lambda p, batch: jnp.sum(p["w"] * batch)
parameters = {"w": jnp.ones(3)}
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_pages_example_runs() -> None:
    first, _ = blocks("wire.md")
    code = POISON + IMPORTS + first + "\nresult = [mean.tolist(), x.tolist()]" + EPILOGUE
    assert run_codes([code] * 2) == [[[0.5] * 3, [1.0] * 3]] * 2


@pytest.mark.stress
def test_the_pages_step_of_jax_runs() -> None:
    pytest.importorskip("jax", reason="of JAX")
    _, step = blocks("wire.md")
    code = (
        POISON + IMPORTS + JAX + step + "\nresult = [float(v) for v in step(parameters, jnp.ones(3))['w']]" + EPILOGUE
    )
    assert run_codes([code] * 2) == [pytest.approx([0.9] * 3)] * 2


def test_the_one_line_is_that_of_the_tests() -> None:
    line, *_ = blocks("horovod.md")
    assert line.startswith(CHANGED[1])
    assert CHANGED[0] in line
