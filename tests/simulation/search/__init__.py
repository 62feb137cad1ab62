"""Looks for the few events that a failing simulated run needs."""
