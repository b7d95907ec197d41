"""Stages of a model on different ranks: cutting the chain, running a schedule's table, PipeDream's older weights."""
