"""The stages of a step."""
