"""Checkpoints of scalers as plain numbers: our format, and reading those of other systems."""
