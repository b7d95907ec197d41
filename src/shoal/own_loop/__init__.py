"""What `shoal.start` returns: a run whose loop is the script's own.

start.py            from the script's objects to a run, and the run file of a loop
objects.py          what a script may hand over, as the run takes it; layouts and strategies that a loop cannot have
loop.py             `Training`: batches, backward, epochs, the objects of the script
steps.py            what the loop yields: one step after the other, and its microbatches; the draws of both
update.py           the update that the script's optimizer makes
plain.py            the same loop in plain PyTorch, for `shoal verify mine.py`
comparison.py       the ranks beside it
"""
