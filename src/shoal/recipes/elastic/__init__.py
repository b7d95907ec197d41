"""Elastic training: replicas come and go while the others go on. See docs/recovery.md.

launch.py       the launcher's side: the coordinator, the replicas' processes, replacements
rank.py         a replica's side: one generation after the other
state_copy.py   what is carried over to the next generation, and copied to those who lack it
"""
