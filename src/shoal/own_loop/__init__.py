"""What `shoal.start` returns: a run whose loop is the script's own.

start.py            from the script's objects to a run
objects.py          what a script may hand over, as the run takes it
loop_file.py        the run file of a loop, from its tables and what the script hands over
refusals.py         layouts and strategies that a loop of its own cannot have
loop.py             `Training`: batches, backward, epochs, the objects of the script
steps.py            what the loop yields: one step after the other, and its microbatches
update.py           the update that the script's optimizer makes
plain.py            the same loop in plain PyTorch, for `shoal verify mine.py`
comparison.py       the ranks beside it
sample_draws.py     random numbers of models that the script calls itself
"""
