"""Formulas of memory: from a TrainSpec to the bytes of one rank. They say bytes, never a verdict."""
