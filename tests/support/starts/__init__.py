"""Learners that only start: small models of each family, and what memory ranks take."""
