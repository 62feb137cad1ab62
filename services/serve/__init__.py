"""`gspo serve`."""
