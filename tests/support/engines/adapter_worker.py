"""A learner of adapters in a process of its own: ``python -m tests.support.engines.adapter_worker WORK`` writes versions.

WORK has ``model/`` and ``groups.npz``. Each version is written as it is published with ``lora.publish = "adapter"`` and
``"merged"``: ``adapter-1`` and so on, and the model below the adapters as ``base``. See ``read_version``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from gspo_protocol.messages import Manifest
from gspo_services.learner.engine.engine import LearnerEngine
from gspo_services.learner.weights.adapter_copy import AdapterCopy
from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.version_copies import VersionCopies
from gspo_services.shared.settings.sections import LoraSection, Settings
from tests.support.learner.learner_worker import OBJECTIVE, settings
from tests.support.learner.trained import train
from tests.support.loss.sequences import load_groups
from tests.support.wire.snapshots import bytes_of, snapshot_from

LORA: Final[dict[str, Any]] = {"rank": 4, "alpha": 8.0, "target_modules": ["attention"]}
NUM_VERSIONS: Final = 3
LEARNING_RATE: Final = 0.02


def read_version(work: Path, name: str) -> Snapshot:
    """A version as it was written."""
    manifest = msgspec.msgpack.decode((work / f"{name}.manifest").read_bytes(), type=Manifest)
    return snapshot_from(manifest, np.fromfile(work / f"{name}.bytes", dtype=np.uint8))


def _write(snapshot: Snapshot, path: Path) -> None:
    path.with_suffix(".manifest").write_bytes(msgspec.msgpack.encode(snapshot.manifest))
    path.with_suffix(".bytes").write_bytes(bytes_of(snapshot))


def main() -> None:
    torch.set_num_threads(1)
    work = Path(sys.argv[1])
    groups = load_groups(work / "groups.npz")
    engine = LearnerEngine.create(work / "model", settings(zero_stage=1, learning_rate=LEARNING_RATE, lora=LORA))
    copies = {
        publish: VersionCopies(engine, Settings(lora=LoraSection(**LORA, publish=publish)), rank=0)
        for publish in ("adapter", "merged")
    }
    for version in range(1, NUM_VERSIONS + 1):
        if version > 1:
            train(engine, groups, OBJECTIVE, policy_version=1)
        for publish, each in copies.items():
            weights = each.copy()
            assert weights is not None
            if isinstance(weights, AdapterCopy):
                _write(weights.base._snapshot, work / "base")
            _write(build_snapshot(version, weights), work / f"{publish}-{version}")
    engine.close()


if __name__ == "__main__":
    main()
