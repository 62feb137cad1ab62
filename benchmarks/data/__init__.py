"""What choices about the data do to a run."""
