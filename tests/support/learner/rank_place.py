"""A rank that reports its place.

``python -m tests.support.learner.rank_place DIRECTORY`` writes the values of ``TOLD`` to DIRECTORY/RANK.
"""

import os
import sys
from pathlib import Path

TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

if __name__ == "__main__":
    Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in TOLD))
