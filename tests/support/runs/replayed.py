"""Whether a run comes out again, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path


def assert_replayed_bit_for_bit(directory: Path, again: Path) -> None:
    """From the checkpoint after two batches, the last two give the weights that the run published, saved and exported."""
    command = [
        sys.executable,
        "-m",
        "gspo_services.runs.replay",
        str(directory),
        "--from-checkpoint",
        "2",
        "--out",
        str(again),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((again / "replay.json").read_text())["weights"] == {"2": "same", "3": "same", "4": "same"}
    saved = [json.loads((root / last_checkpoint(root) / "checkpoint.json").read_text()) for root in (directory, again)]
    assert saved[0]["weights_digest"] == saved[1]["weights_digest"]
    assert saved[0]["state"]["mismatch"] == saved[1]["state"]["mismatch"]
    exported = [(root / "export" / "model.safetensors").read_bytes() for root in (directory, again)]
    assert exported[0] == exported[1]


def last_checkpoint(root: Path) -> str:
    return "checkpoints/" + (root / "checkpoints" / "latest").read_text().strip()
