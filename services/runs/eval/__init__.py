"""``gspo eval``: scores model directories and checkpoints on the sets of a configuration, with real SGLang."""
