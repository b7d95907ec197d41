"""The generated reference."""

from __future__ import annotations

from shoal.config.load import markdown
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
