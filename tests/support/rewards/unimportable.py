"""A module of rewards that cannot be imported."""

raise RuntimeError("no key is set")
