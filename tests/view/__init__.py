"""The page of ``gspo view`` in real Chromium; run by ``make test-view``."""
