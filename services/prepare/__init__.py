"""Everything before a run: a new project, checks, episodes played by hand, tiny models."""
