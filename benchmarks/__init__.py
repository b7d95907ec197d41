"""Benchmarks of Shoal's own development, run from the repository: `python -m benchmarks.zero --pairs 30 --json`.

Each module is one benchmark with its command line; what they share is in `shoal.bench`. They print a table, or with
`--json` one object of the same form as `shoal bench`. A check that does not hold changes no exit code.
"""
