"""Several brokers that share a run: their weather."""
