"""Configuration: TOML files and `key=value` overrides become frozen, typed tables, or are refused in one sentence.

A room declares its own tables (`Table`, `says`) beside what they configure. This room knows how tables are read,
checked, written and documented, and imports no torch.
"""

from shoal.config.check import Positive, PositiveFloat, Table, checked, says
from shoal.config.load import apply, dumps, load, markdown, read

__all__ = ["Positive", "PositiveFloat", "Table", "apply", "checked", "dumps", "load", "markdown", "read", "says"]
