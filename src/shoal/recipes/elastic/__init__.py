"""Elastic training: replicas come and go while the others go on. See docs/recovery.md.

launch.py       the launcher: the coordinator, a process a replica, replacements
replica.py      a replica: one generation after the other, until the run is over
meeting.py      the store at which the members of a generation meet
generation.py   the beginning of a generation: groups, parts, and the state for those who lack it
standing.py     whether a step is changing the state, and what is carried over to the next generation
state_copy.py   the copy of a state, by chunks with hashes
showing.py      sinks while ranks change, and who trains since when
seat.py         what the launcher tells a replica
"""
