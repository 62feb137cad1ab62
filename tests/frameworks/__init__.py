"""Environments and agents of other projects, each in a Python of its own, against the real endpoint."""
