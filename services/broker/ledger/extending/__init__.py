"""Usual chunks: what they change of a leased trajectory, counted without a row for each, in memory and on the disk."""

from services.broker.ledger.extending.extensions import MOST_BEHIND, Extensions, Taken, extended_row

__all__ = ["MOST_BEHIND", "Extensions", "Taken", "extended_row"]
