"""Where public data sets lie: the tests that need one are skipped without it."""

import os
from pathlib import Path

_BESIDE = Path(__file__).parents[4] / "shared" / "data"
# Absolute: a test that reads them may have gone to a folder of its own by then.
PUBLIC_DATA = Path(os.environ.get("GSPO_DATA_DIR", _BESIDE)).resolve()
