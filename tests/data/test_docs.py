"""The examples of docs/data.md are tables that a run file may hold, and the function runs."""

import re
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.data.config import DataConfig

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
TABLES = re.findall(r"```toml\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("text", TABLES)
def test_tables_are_accepted(text: str):
    """Each example is a whole table `[data]`."""
    msgspec.convert(tomllib.loads(text)["data"], DataConfig)


def test_there_is_an_example_of_every_new_kind():
    """A kind that is described has an example."""
    kinds = {tomllib.loads(text)["data"]["kind"] for text in TABLES}
    assert kinds >= {"parquet", "webdataset", "images", "jsonl", "mixture", "stream"}


def test_the_function_runs():
    """The augmentation of one's own changes the inputs alone."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL) if "def brighter" in code]
    names: dict = {}
    exec(code, names)
    changed = names["brighter"]({"inputs": np.full(3, 0.5), "targets": 1}, np.random.default_rng(0))
    assert changed["targets"] == 1
    assert 0.4 <= changed["inputs"][0] <= 0.6


def test_the_items_of_the_example_begin_anywhere():
    """Its function is data with a start of its own."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL) if "def items" in code]
    names: dict = {}
    exec(code, names)
    items = names["items"]()
    next(items)
    (x, label), (again, same) = next(items), next(names["items"](start=1))
    assert label == same
    assert x.tolist() == again.tolist()
