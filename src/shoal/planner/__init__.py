"""Which layout is fast and fits: legal plans, their predicted time and memory, and their simulation."""
