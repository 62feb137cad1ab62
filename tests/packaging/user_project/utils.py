"""What every project has in a file of this name."""

LOWEST = 3.0
