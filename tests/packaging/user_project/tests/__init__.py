"""A package of the user."""
