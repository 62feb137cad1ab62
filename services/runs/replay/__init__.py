"""Trains recorded batches again, without engines and without a broker."""
