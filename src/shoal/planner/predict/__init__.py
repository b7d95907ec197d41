"""Seconds and bytes of one step under one plan, itemised; arrows point from the predictor down to the machine."""
