"""Which plans there are, which fit, and which are best."""
