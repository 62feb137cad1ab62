"""What these tests prove: the files in GSPO_TEST_DIST, or such files built from a copy of the sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.installation import build_wheel, copy_sources


def released(pattern: str) -> Path | None:
    folder = os.environ.get("GSPO_TEST_DIST")
    if not folder:
        return None
    (found,) = Path(folder).glob(pattern)
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = released("*.whl")
    return found or build_wheel(copy_sources(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by setuptools alone, if it is not given."""
    if found := released("*.tar.gz"):
        return found
    source, out = copy_sources(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("sdist")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, check=True, timeout=120, capture_output=True)
    (made,) = out.glob("*.tar.gz")
    return made
