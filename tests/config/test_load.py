"""Run files: what is refused, in what words, and what comes back."""

from __future__ import annotations

import subprocess
import sys
from collections import UserList
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.check import checked
from shoal.config.load import dumps, dumps_set, load, tables_of
from shoal.errors import ConfigError
from tests.config.tables import Big, Place, Root, Small


def loaded(tmp_path: Path, text: str, *overrides: str) -> Root:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load(Root, path, overrides)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ('[place]\nname = "a"\nstep = 4', (), ["place.step", "unknown key", "did you mean 'steps'", "run.toml"]),
        ('[place]\nname = "a"\n[thin]\n', (), ["thin", "did you mean 'thing'"]),
        ('[place]\nname = "a"', ("place.stepz=4",), ["place.stepz", "did you mean 'steps'"]),
        ('[place]\nname = "a"\nsteps = "4"', (), ["place.steps", "found '4'", "a whole number"]),
        ('[place]\nname = "a"\nsteps = 4.5', (), ["place.steps", "found 4.5"]),
        ('[place]\nname = "a"\nsteps = 0', (), ["place.steps", "found 0", "of at least 1"]),
        ('[place]\nname = "a"\nsteps = 101', (), ["place.steps", "of at most 100"]),
        ('[place]\nname = "a"\nrate = -1.0', (), ["place.rate", "found -1.0", "above 0"]),
        ('[place]\nname = "a"\norder = "upp"', (), ["place.order", "'upp'", "did you mean 'up'", "'down'"]),
        ("[place]\nsteps = 4", (), ["place.name", "missing", "What it is called"]),
        ('[place]\nname = "a"\n[thing]\nkind = "bigg"', (), ["thing.kind", "'bigg'", "did you mean 'big'", "'small'"]),
        (
            '[place]\nname = "a"\n[thing]\nkind = "small"\nwidth = 4',
            (),
            ["thing.width", "unknown key where kind = 'small' (kinds that have it: 'big')", "names"],
        ),
        ('[place]\nname = "a"\n[thing]\nwidth = 5', (), ["thing", "width = 5", "must be even", "6"]),
        ('place = "a"', (), ["place", "it is a table", "[place]"]),
        ("", (), ["place", "missing"]),
        ("[place", (), ["not a TOML file", "run.toml"]),
        ('[place]\nname = "a"', ("steps=4",), ["'steps=4' is no override", "run.steps=100"]),
        ('[place]\nname = "a"', ("place.steps",), ["is no override"]),
        ('[place]\nname = "a"', ("place.steps.more=1",), ["place.steps"]),
    ],
)
def test_a_mistake_is_named_with_its_repair(tmp_path: Path, text: str, overrides: tuple, words: list[str]) -> None:
    """File, key, what was found, what is allowed, and the nearest key: one sentence for each kind of mistake."""
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text, *overrides)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_missing_file_names_those_that_are_there(tmp_path: Path) -> None:
    """A mistyped file name is answered with the nearest run file beside it, another name with those that are there."""
    for name in ("real.toml", "digits.toml"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"is missing \(did you mean .*digits\.toml\?\): give a TOML file"):
        load(Root, tmp_path / "digit.toml")
    with pytest.raises(ConfigError, match=r"is missing: give a TOML file; there are .*digits\.toml, .*real\.toml"):
        load(Root, tmp_path / "somewhere-else.toml")


def test_a_run_directory_is_answered_with_its_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=rf"is a folder, .*: give a TOML file, such as {tmp_path}/run\.toml, or the"):
        load(Root, tmp_path)


def test_a_missing_recipe_says_where_recipes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package has none, though every example of its help names one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"recipes/digits\.toml is missing: .* in a copy of Shoal's repository"):
        load(Root, Path("recipes/digits.toml"))


def test_overrides_are_toml_and_the_last_wins(tmp_path: Path) -> None:
    """Numbers, lists, bare words and paths as values; a whole table can come from the command line."""
    root = loaded(
        tmp_path,
        "",
        "place.name=/tmp/a b",
        "place.steps=4",
        "place.steps=5",
        "thing.kind=small",
        'thing.names=["x", "y"]',
    )
    assert root == Root(place=Place(name="/tmp/a b", steps=5), thing=Small(names=["x", "y"]))


def test_a_text_that_looks_like_a_number_stays_a_text(tmp_path: Path) -> None:
    """`place.name=2024` names it "2024"; quotes may be written and then do not belong to the name."""
    assert loaded(tmp_path, "", "place.name=2024").place.name == "2024"
    assert loaded(tmp_path, "", 'place.name="2024"').place.name == "2024"


def test_a_table_without_kind_is_the_default_variant(tmp_path: Path) -> None:
    """`thing.width=4` alone means the default kind."""
    assert loaded(tmp_path, '[place]\nname = "a"', "thing.width=4").thing == Big(width=4)


@given(
    name=st.text(min_size=1),
    steps=st.integers(1, 100),
    rate=st.none() | st.floats(1e-9, 1e9),
    order=st.sampled_from(["up", "down"]),
    thing=st.builds(Big, width=st.integers(1, 50).map(lambda n: 2 * n)) | st.builds(Small, names=st.lists(st.text())),
)
def test_what_is_written_is_read_again(tmp_path_factory, name, steps, rate, order, thing) -> None:
    """The resolved file, and the one without defaults, load to the same tables, whatever they hold."""
    root = Root(place=Place(name=name, steps=steps, rate=rate, order=order), thing=thing)
    path = tmp_path_factory.mktemp("again") / "run.toml"
    for text in (dumps(root), dumps_set(root)):
        path.write_text(text, encoding="utf-8")
        assert load(Root, path) == root
    assert len(dumps_set(root)) <= len(dumps(root))


@dataclass
class Settings:
    place: Mapping[str, Any]


class Node(Mapping[str, Any]):
    """As OmegaConf's: a mapping of such mappings, and no dictionary."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def test_a_configuration_may_be_any_mapping_or_a_dataclass() -> None:
    """With others inside, and lists of their own kind; anything else is refused by its type."""
    own = {"place": {"name": "a", "steps": [1, 2]}}
    assert tables_of(Settings(Node(name="a", steps=UserList([1, 2])))) == own
    assert tables_of(Node(place=Node(name="a", steps=[1, 2]))) == own
    for wrong in (Settings, 3, [own], SimpleNamespace(place={})):
        with pytest.raises(ConfigError, match=f"is of the type {type(wrong).__name__}: give a run file"):
            tables_of(wrong)


def test_tables_are_frozen() -> None:
    """A run file cannot change under a run."""
    with pytest.raises(AttributeError):
        checked({"place": {"name": "a"}}, Root, file="x").place.steps = 4  # type: ignore[misc]


def test_the_tables_of_a_run_file_are_read_without_torch() -> None:
    """A wrong key is refused before anything heavy is imported."""
    code = "import sys, shoal.runfile.load, shoal.config; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], env=None, check=False).returncode == 0
