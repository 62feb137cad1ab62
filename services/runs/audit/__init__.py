"""Proves from what a run has written that every trajectory was trained exactly once or dropped for a stated reason."""
