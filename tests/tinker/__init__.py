"""Tinker's own client, unmodified and in a Python of its own, against the service: `make test-tinker`."""
