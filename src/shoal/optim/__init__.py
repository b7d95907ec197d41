"""Optimizers and schedules of the learning rate; each table declares the state that its optimizer keeps."""
