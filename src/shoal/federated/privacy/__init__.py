"""Differential privacy: how much a model tells of one client or of one sample, counted and bounded."""
