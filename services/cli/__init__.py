"""The ``gspo`` command: one module or room for each subcommand that is not a process of its own."""
