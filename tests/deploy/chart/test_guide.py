"""docs/guide/kubernetes.md: its order, and every command in it that needs no cluster."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.cluster import Cluster, render
from tests.deploy.conftest import copy_manifests
from tests.support.pages import blocks

pytestmark = pytest.mark.deploy
ROOT: Final = Path(__file__).parents[3]
GUIDE: Final = ROOT / "docs" / "guide" / "kubernetes.md"
NEEDS_A_CLUSTER: Final = re.compile(r"kubectl (?!kustomize)|helm install|kind |make (?:images|push-)")
ORDER: Final = [
    "Install", "First run", "Your code and data", "GPUs", "Backup and restore", "Upgrades", "Scaling", "Monitoring",
    "Second run", "What is left to you", "Failures",
]  # fmt: skip


def commands() -> list[str]:
    return [line for block in blocks("bash", pages=(GUIDE,)) for line in block.text.splitlines() if line]


def test_the_page_goes_in_the_order_of_the_work() -> None:
    headings = re.findall(r"^## (.*)$", GUIDE.read_text(), re.MULTILINE)
    assert headings == ORDER


def test_every_command_that_needs_no_cluster_is_executed_here(tmp_path: Path) -> None:
    """In the page's order, in a copy of deploy/."""
    copy_manifests(tmp_path)
    shutil.rmtree(tmp_path / "deploy" / "k8s" / "components" / "keys" / "files")
    program = tmp_path / "bin" / "gspo"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gspo_services.cli.main "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "my.yaml").write_text("storage: {learnerRun: {storageClassName: fast}}\n")
    environment = os.environ | {"PATH": path, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    executed = [command for command in commands() if not NEEDS_A_CLUSTER.match(command)]
    for command in executed:
        done = subprocess.run(
            ["bash", "-ec", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "dist" / "gspo" / "values.schema.json").is_file()
    claim = Cluster(render(tmp_path / "dist" / "mine")).one("PersistentVolumeClaim", "learner-run")
    assert claim["spec"]["storageClassName"] == "fast"
    assert "https://git.example.com" in (tmp_path / "deploy" / "monitoring" / "prometheusrule.yaml").read_text()
    assert len(executed) >= 7


def test_directories_and_files_in_commands_are_there() -> None:
    named = {word.rstrip(".,)") for word in re.findall(r"deploy/[\w./-]+", GUIDE.read_text())}
    keys = "deploy/k8s/components/keys/files"
    made = {keys, f"{keys}/operator.secret", "deploy/k8s/overlays/mine"}
    assert len(named) > 8
    assert [name for name in sorted(named - made) if not (ROOT / name).exists()] == []
