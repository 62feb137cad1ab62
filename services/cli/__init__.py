"""The `gspo` command."""
