"""The processes of a run and the ``gspo`` command."""
