"""Usual chunks: what they change of a leased trajectory, counted without a row for each, in memory and on the disk."""

from services.broker.ledger.extending.extension import MOST_BEHIND, Extension, extension_of

__all__ = ["MOST_BEHIND", "Extension", "extension_of"]
