"""Arithmetic that stands alone: random numbers by counter, norms, fingerprints, mixing matrices of graphs."""
