"""The planner beside the run file: what `shoal plan` and `layout.auto` say of a run, and what a rank measured."""
