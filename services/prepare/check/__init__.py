"""``gspo check``: what is wrong with a configuration, and what it will need, found in seconds and without a run."""
