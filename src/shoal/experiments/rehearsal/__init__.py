"""Rehearsals: a user's run under injected faults, beside the same run without any."""
