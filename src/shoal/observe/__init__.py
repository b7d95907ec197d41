"""What is measured of a run, who hears of it, and the page that shows it.

The training loop talks to `Sinks` (`shoal.observe.sink`); `shoal.observe.sinks.open_sinks` makes those of a rank: its
log and events, and on rank 0 a live line or plain lines and the report. `shoal.observe.report.write_report` writes the
page from a run directory alone, whatever became of the run.
"""
