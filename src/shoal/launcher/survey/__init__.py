"""Several hosts, looked at before a run: one probe on each, what they can tell alone, and the links between them."""
