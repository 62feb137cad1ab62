"""Whether a run comes out again, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.processes.run_process import gspo


def assert_replayed_bit_for_bit(directory: Path, again: Path, begin: int = 2, end: int = 4) -> None:
    """From the checkpoint after ``begin`` batches, the others give the weights that the run of ``end`` batches published,
    saved and, if it did, exported."""
    command = [
        sys.executable,
        "-m",
        "gspo_services.runs.replay",
        str(directory),
        "--from-checkpoint",
        str(begin),
        "--out",
        str(again),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((again / "replay.json").read_text())["weights"] == {
        str(batch): "same" for batch in range(begin, end + 1)
    }
    saved = [json.loads((root / last_checkpoint(root) / "checkpoint.json").read_text()) for root in (directory, again)]
    assert saved[0]["weights_digest"] == saved[1]["weights_digest"]
    assert saved[0]["state"]["mismatch"] == saved[1]["state"]["mismatch"]
    exported = [root / "export" / "model.safetensors" for root in (directory, again)]
    assert exported[0].exists() == exported[1].exists()
    assert not exported[0].exists() or exported[0].read_bytes() == exported[1].read_bytes()


def last_checkpoint(root: Path) -> str:
    return "checkpoints/" + (root / "checkpoints" / "latest").read_text().strip()


def assert_replayed_whole(directory: Path, num_batches: int) -> None:
    """``gspo replay`` finds each version of the run again."""
    said = gspo("replay", str(directory))
    assert f"bit for bit the same as published by the run, after each of {num_batches} of" in said
