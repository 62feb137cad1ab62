"""Environments: where tasks come from, what an action leads to, what it is worth. No torch, no sockets."""
