"""Puts the parts of a run together: process, workload, generation. Every other door stands on `run.open_run`.

run.py              `open_run`: the parts of one rank, in the order in which they need each other
process.py          what a rank has for as long as its process lives: device, store
workload.py         model, data, loss, precision: what outlives a change of the membership (objects.py, reading.py)
generation.py       what lasts as long as the membership: mesh, parts, forward and backward, gradients, strategy
train_step.py       the step: its update policy, what happens to gradients
run_state.py        what a checkpoint of the run holds
start.py            being a rank, or starting ranks
job.py              what the loop is given: where the run goes on, saver, sinks, cadence
"""
