"""Puts the parts of a run together: process, workload, generation. Every other door stands on `run.open_run`."""
