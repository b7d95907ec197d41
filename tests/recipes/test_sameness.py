"""What ranks compare before the first step, and what may differ between hosts."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.data.dataset import Dataset
from shoal.errors import ConfigError, UserCodeError
from shoal.recipes.sameness import require_same, require_same_start, samples_of
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile


class Board:
    """What rank 0 announced, for the ranks that come after it."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def __call__(self, key: str, find: Callable[[], str]) -> str:
        return self.said.setdefault(key, find())


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[..., RunFile]:
    def loaded(**keys: object) -> RunFile:
        given = {"run.name": "a", "run.steps": 3, "model.kind": "gpt", "data.kind": "tokens", "data.path": "tokens.bin"}
        given |= {"batch.global_samples": 4, "batch.sequence": 8} | keys
        tables: dict[str, dict[str, object]] = {}
        for key, value in given.items():
            table, name = key.split(".")
            tables.setdefault(table, {})[name] = value
        lines = [
            f"[{table}]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in t.items()) for table, t in tables.items()
        ]
        path = tmp_path / "run.toml"
        path.write_text("\n".join(lines))
        return load_run(path)

    return loaded


@pytest.mark.parametrize("key", ["data.path", "run.directory", "data.held_out"])
def test_where_a_host_keeps_things_may_differ(run_file: Callable[..., RunFile], key: str) -> None:
    board = Board()
    require_same_start(0, board, run_file(**{key: "/here/a"}))
    require_same_start(1, board, run_file(**{key: "/there/b"}))


@pytest.mark.parametrize(("key", "value"), [("data.dtype", "uint8"), ("run.seed", 7), ("batch.global_samples", 8)])
def test_another_key_is_named_with_both_values(run_file: Callable[..., RunFile], key: str, value: object) -> None:
    board = Board()
    require_same_start(0, board, run_file())
    with pytest.raises(ConfigError, match=f"rank 1 was started with {key} = "):
        require_same_start(1, board, run_file(**{key: value}))


def data_of(numbers: np.ndarray) -> Dataset:
    return Dataset(train=[(np.float32(n), np.int64(0)) for n in numbers], held_out=None)


def test_contents_are_compared_all_over_the_data() -> None:
    """Another value in a sixteenth of the samples is found, wherever that sixteenth lies."""
    same = np.arange(320)
    for part in range(16):
        board, other = Board(), same.copy()
        other[part * 20 : (part + 1) * 20 + 2] += 1
        require_same(0, board, {"data": samples_of(data_of(same))})
        require_same(1, board, {"data": samples_of(data_of(same))})
        with pytest.raises(UserCodeError, match="rank 1 has another data than rank 0"):
            require_same(1, board, {"data": samples_of(data_of(other))})


def test_another_number_of_samples_is_found() -> None:
    board = Board()
    require_same(0, board, {"data": samples_of(data_of(np.arange(32)))})
    with pytest.raises(UserCodeError, match="training data of 31 samples"):
        require_same(1, board, {"data": samples_of(data_of(np.arange(31)))})
