"""Runs, live or ended: read, audited, replayed, exported, compared, backed up, viewed, evaluated, tracked.

Users get what scripts and notebooks need from ``gspo.runs``. See docs/guide/python.md.
"""
