"""Runs beside runs: where two part (`diff`), the same one again (`reproduce`), many with other keys (`sweep`)."""
