"""What these tests need of the machine, and a run on it. `make test-pods`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.cluster import K8S, Cluster, render
from tests.pods.node import Node

TOOLS = ("kubectl", "ip", "nft", "unshare", "setpriv", "chroot")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pods' init containers make, made once."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([sys.executable, "-m", "services.cli.main", "model", "tiny", str(path)], check=True, capture_output=True)
    return path


@pytest.fixture
def start_node(tmp_path: Path, model: Path) -> Callable[[], Node]:
    """Makes a node with the overlay `cpu`, to be entered."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() or missing:
        pytest.skip(f"needs root and {', '.join(missing or TOOLS)}: network namespaces, mounts")
    # An unprivileged user must be able to pass.
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o711)
    return lambda: Node(Cluster(render(K8S / "overlays" / "cpu")), tmp_path, model)
