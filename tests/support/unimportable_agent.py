"""An agent's module that fails while it is imported."""

raise RuntimeError("the model server's address is not set")
