"""Several brokers that share a run: their weather, and what is audited across them."""
