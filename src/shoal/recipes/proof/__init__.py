"""`shoal verify`: a layout beside one process, number by number."""
