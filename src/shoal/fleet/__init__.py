"""The launcher's side of elastic training: the replicas of a host. Nothing here imports torch. See docs/recovery.md.

launch.py            the launcher of a host, and the coordinator if there is no other
fleet.py             the replicas of a host: replacements, and what follows from what the coordinator says
processes.py         the processes of a replica, and what the launcher assigns to a rank
scaling.py           how many replicas the run wants
"""
