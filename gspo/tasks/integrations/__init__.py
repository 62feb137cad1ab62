"""Agents that play other people's environments: a worker loads these files by their path, in the user's own Python.

Each module needs the standard library, ``gspo.tasks.agents`` and the package that it adapts, and nothing else of this
project.
"""
