"""One real broker against a large fleet of rollouts without engines: what grows with their number, and how fast."""
