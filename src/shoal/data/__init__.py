"""Data: which sample stands where in a run, and batches of samples, read ahead.

order, cursor    the sample at a position; the positions that are used
feed             one replica's microbatches, step by step
sample           what a data set is; samples side by side
build            what a run trains and evaluates on
"""
