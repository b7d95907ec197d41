"""Pipeline schedules as data: who computes what, in which order.

Executor, printer, simulator and planner read the same table. Pure arithmetic: no torch, no clocks.
"""
