"""The ``gspo`` command."""
