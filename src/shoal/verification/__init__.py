"""`shoal verify`: the same steps under the layout and in one process, compared number by number.

verify.py           one rank of the proof of a layout; strategies.py of one where replicas take steps of their own
reference.py        the reference on rank 0
layout_step.py      a step under the layout, gathered, also with lossy codecs, 8-bit moments and stale weights
replicas.py         a step of replicas, taken apart
plain_rules.py      how replicas agree, as the papers write it
scripts.py          the same of a script's loop
refusals.py         what cannot be proved
verdict.py          what was found, for people and as JSON
"""
