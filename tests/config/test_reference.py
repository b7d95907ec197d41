"""The generated reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from shoal.config.check import Table, checked, says
from shoal.config.load import markdown
from shoal.errors import ConfigError
from tests.config.tables import Root


def test_every_key_is_in_the_reference_with_its_sentence() -> None:
    """Tables, variants, types, bounds, defaults and sentences all appear."""
    text = markdown(Root, title="Keys")
    parts = [
        "## `[place]`",
        '### `kind = "big"` (default)',
        '### `kind = "small"`',
        "| `steps` | int ≥ 1, ≤ 100 | `3` | How many. |",
        "| `name` | str | required |",
        '`"up"`, `"down"`',
        "| `rate` | float > 0 | — |",
    ]
    for part in parts:
        assert part in text, part


# Keys that are tables, or take one beside words.


class Near(Table, frozen=True, tag_field="kind", tag="near"):
    """The near ones."""

    reach: Annotated[int, says("How far.")] = 3


class Step(Table, frozen=True):
    """One of several."""

    at: Annotated[int, says("When.")]


class Named(Table, frozen=True):
    """One with a name."""

    weight: Annotated[float, says("How heavy.")] = 1.0


class Holder(Table, frozen=True):
    """Holds tables."""

    sight: Annotated[Literal["all"] | Near, says("What is seen.")] = "all"
    later: Annotated[tuple[Step, ...], says("What follows.")] = ()
    named: Annotated[dict[str, Named], says("By their names.")] = msgspec.field(default_factory=dict)


class Pages(Table, frozen=True):
    """A root."""

    holder: Holder = Holder()


@pytest.mark.parametrize("sight", ["all", {"kind": "near", "reach": 2}])
def test_a_key_takes_a_word_or_a_table(sight: Any) -> None:
    assert checked({"holder": {"sight": sight}}, Pages, file="a.toml").holder.sight == (
        sight if sight == "all" else Near(reach=2)
    )


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holder.sight: found 'al', did you mean 'all'"):
        checked({"holder": {"sight": "al"}}, Pages, file="a.toml")


def test_tables_inside_of_tables_have_their_keys_in_it() -> None:
    text = markdown(Pages, title="Keys")
    parts = [
        '| `sight` | `"all"` or a table, see below | `"all"` | What is seen. |',
        "| `later` | tables, see below | — | What follows. |",
        '### `[holder.sight]`\n\n#### `kind = "near"`\n\nThe near ones.',
        "| `reach` | int | `3` | How far. |",
        "### `[[holder.later]]`\n\nOne of several.",
        "| `at` | int | required | When. |",
        "| `named` | tables by name | `{}` | By their names. |",
        "### `[holder.named.NAME]`\n\nOne with a name.",
    ]
    for part in parts:
        assert part in text, part
