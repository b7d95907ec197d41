"""Context parallelism: every rank has a part of each sequence, and queries meet the keys of others.

core.py        which tokens a rank holds; the base of all cores, and what they send each other
all_gather.py  all-gather of keys and values       ring.py       they travel round a ring
ulysses.py     heads for sequence, all-to-all      fetch.py      the blocks that a sparse mask needs
kinds.py       the cores by name, and how they take the place of a model's attentions
tiles.py       attention tile by tile, merged by the log-sum-exp; kernels.py: one tile, with its backward
"""
