"""What ranks compare before the first step, and what may differ between hosts."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shoal.assembly.sameness import (
    KnownCode,
    code_of,
    contents_of,
    require_same,
    require_same_code,
    require_same_start,
    samples_of,
)
from shoal.data.dataset import Dataset
from shoal.errors import ConfigError, UserCodeError
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.dtype", "uint8"),
        ("run.seed", 7),
        ("batch.global_samples", 8),
        ("precision.kind", "bfloat16"),
        ("optimizer.lr", 0.02),
        ("optimizer.weight_decay", 0.5),
    ],
)
def test_another_key_is_named_with_both_values(run_file: Callable[..., RunFile], key: str, value: object) -> None:
    board = Board()
    require_same_start(0, board, run_file())
    with pytest.raises(ConfigError, match=f"rank 1 was started with {key} = "):
        require_same_start(1, board, run_file(**{key: value}))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType | None]]:
    """`modules("here", "it", "x = 1")`: from now on a rank that finds the module `it` in the folder `here`, and has
    imported it; with `imported=False` it has not.
    """

    def found(folder: str, name: str, text: str, *, imported: bool = True) -> ModuleType | None:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / folder)
        sys.modules.pop(name, None)
        names.add(name)
        return importlib.import_module(name) if imported else None

    names: set[str] = set()
    yield found
    for name in names:
        sys.modules.pop(name, None)


def test_another_module_is_named_wherever_it_lies(modules: Callable[..., Any]) -> None:
    """Imported by both ranks, from folders that neither was started in."""
    board = Board()
    modules("there", "own_layers", "WIDTH = 1")
    require_same_code(0, board, [])
    modules("here", "own_layers", "WIDTH = 1")
    require_same_code(1, board, [])
    modules("here", "own_layers", "WIDTH = 2")
    with pytest.raises(
        UserCodeError, match=r"rank 1 runs another module own_layers \(.*here/own_layers\.py\) than rank 0"
    ):
        require_same_code(1, board, [])


def test_a_module_that_rank_0_alone_has_imported_is_compared_where_it_lies(modules: Callable[..., Any]) -> None:
    """Another file of its name is refused; none at all is rank 0's own affair, unless it trains with it."""
    board, sole = Board(), Board()
    layers = modules("there", "own_layers", "class Layer: ...")
    require_same_code(0, board, [])
    require_same_code(0, sole, [layers.Layer()])
    modules("here", "own_layers", "class Layer: wide = True", imported=False)
    with pytest.raises(UserCodeError, match="rank 1 runs another module own_layers"):
        require_same_code(1, board, [])
    modules("here", "own_layers", "class Layer: ...", imported=False)
    require_same_code(1, board, [])
    with pytest.raises(UserCodeError, match="rank 0 trains with code of the module own_layers, and rank 1 does not"):
        require_same_code(1, sole, [])


def test_code_that_one_rank_alone_trains_with_is_refused(modules: Callable[..., Any]) -> None:
    """Of a module that rank 0 has not imported; installed packages and Shoal's models are no such code."""
    board = Board()
    require_same_code(0, board, [])
    layers = modules("here", "own_layers", "class Layer: ...\ndef loss(): ...")
    require_same_code(1, board, [np.zeros(1), layers])
    for used in (layers.Layer(), layers.loss, layers.Layer):
        with pytest.raises(
            UserCodeError, match="rank 1 trains with code of the module own_layers, and rank 0 does not"
        ):
            require_same_code(1, board, [used])


def test_code_is_hashed_again_when_a_file_changes(modules: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of the same size, and a module that is imported later; else what was found first is what is said."""
    modules("here", "own_layers", "WIDTH = 1")
    known, hashed = KnownCode([]), list[object]()
    first = known.now()
    monkeypatch.setattr("shoal.assembly.sameness.code_of", lambda used: (hashed.append(used), code_of(used))[1])
    assert known.now() is first
    assert not hashed
    modules("here", "own_layers", "WIDTH = 2")
    second = known.now()
    assert second.modules["own_layers"] != first.modules["own_layers"]
    modules("here", "own_losses", "SCALE = 1")
    assert "own_losses" in known.now().modules
    assert len(hashed) == 2


def test_another_file_of_shoals_is_named() -> None:
    """Whether it was imported or not."""
    board = Board()
    require_same_code(0, board, [])
    code = json.loads(board.said["same/code"])
    code["files"]["shoal/api/__init__.py"] = "0"
    board.said["same/code"] = json.dumps(code)
    with pytest.raises(UserCodeError, match=r"rank 1 runs another shoal/api/__init__\.py than rank 0"):
        require_same_code(1, board, [])


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


class Drawn:
    """Sample 0 is the number 0, sample 1 another one at each reading, sample 2 cannot be read."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[float, int]:
        if index == 2:
            raise ValueError("unreadable")
        return (self._generator.random() if index else 0.0), 0


def test_a_checkpoint_keeps_hashes_of_what_is_always_the_same() -> None:
    """Not of samples that are drawn anew or cannot be read, nor of held-out data; weights count as contents."""
    kept = contents_of(samples_of(Dataset(train=Drawn(), held_out=[(0.0, 0)])))
    assert list(kept) == ["training sample 0"]
    weighed = [contents_of(samples_of(Dataset(train=[(0.0, 0, weight)]))) for weight in (1.0, 1.0, 2.0)]
    assert weighed[0] == weighed[1] != weighed[2]


def test_another_number_of_samples_is_found() -> None:
    board = Board()
    require_same(0, board, {"data": samples_of(data_of(np.arange(32)))})
    with pytest.raises(UserCodeError, match="training data of 31 samples"):
        require_same(1, board, {"data": samples_of(data_of(np.arange(31)))})
