"""Where the ledgers of a run are: one, or one for each of its brokers."""

from services.runs.ledgers.directories import broker_name, is_held, ledger_directories, ledger_directory, other_ledgers

__all__ = ["broker_name", "is_held", "ledger_directories", "ledger_directory", "other_ledgers"]
