"""What is below scripts/ is run by tests, as programs: not imported."""

collect_ignore = ["scripts"]
