"""Configuration: TOML files and `key=value` overrides become frozen, typed tables, or are refused in one sentence.

A room declares its own tables (`check.Table`, `check.says`) beside what they configure. This room knows how tables are
read, checked, written and documented, and imports no torch.
"""
