"""Collective algorithms as data: who sends which chunk to whom, in which step, and what is added there."""
