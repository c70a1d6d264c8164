"""Ranks: who decides together, and how."""
