"""Usual chunks: what they change of a leased trajectory, counted without a row for each."""

from services.broker.ledger.extending.extension import Extension, extension_of

__all__ = ["Extension", "extension_of"]
