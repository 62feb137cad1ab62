"""A small checkout: the real scripts of requirements/setup, lists of tiny packages, and package indexes on loopback."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[3] / "requirements" / "setup"

PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "project"
version = "1.0"
"""
BACKEND = """
import zipfile
def build_editable(folder, settings=None, metadata=None):
    with zipfile.ZipFile(f"{folder}/project-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("project.py", "")
        archive.writestr("project-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\n")
        archive.writestr("project-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr("project-1.0.dist-info/RECORD", "")
    return "project-1.0-py3-none-any.whl"
"""


def wheel(index: Path, name: str, version: str) -> str:
    """Put a package with a module of its name into an index's folder; return its line for a list, with its hash."""
    module = name.replace("-", "_")
    folder = index / "simple" / name
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{module}-{version}.dist-info"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}.py", f"__version__ = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{module}.py,,\n")
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@contextmanager
def served(index: Path, broken: str = "") -> Iterator[str]:
    """The address of an index that a folder holds, and in its `asked` file the paths that were asked for.

    A file whose name begins with `broken` ends in the middle.
    """

    class Quiet(SimpleHTTPRequestHandler):
        def log_request(self, code: object = "-", size: object = "-") -> None:
            with (index / "asked").open("a") as asked:
                asked.write(f"{self.path}\n")

        def copyfile(self, source: Any, outputfile: Any) -> None:
            if broken and Path(self.path).name.startswith(broken):
                outputfile.write(source.read(100))
            else:
                super().copyfile(source, outputfile)

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(index)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Checkout:
    """Its lists name packages of `main`, and PyTorch's CPU build is in `own` alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.main, self.own = folder / "a chèckout of gspo", folder / "main", folder / "own"
        (self.folder / "requirements").mkdir(parents=True)
        shutil.copytree(SCRIPTS, self.folder / "requirements" / "setup", ignore=shutil.ignore_patterns("__pycache__"))
        (self.folder / "pyproject.toml").write_text(PROJECT)
        (self.folder / "backend.py").write_text(BACKEND)
        self.write("torch-cpu", wheel(self.own, "torch", "2.13.0+cpu"))
        self.write("torch-cuda", wheel(self.main, "nvidia-part", "1.0") + wheel(self.main, "torch", "2.13.0"))
        for name in ("pip", "cpu", "dev", "deepspeed"):
            self.write(name, wheel(self.main, f"of-{name}", "1.0"))

    def write(self, name: str, text: str) -> None:
        (self.folder / "requirements" / f"{name}.txt").write_text(f"# {name}\n{text}")

    def setup(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh with nothing of this machine's configuration of pip."""
        kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(("PIP_", "TORCH", "GSPO_"))}
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        environment = {**kept, "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable, "PATH": path, **variables}
        command = ["sh", "requirements/setup/setup.sh", *words]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=240
        )

    def installed(self, environment: str = ".venv") -> set[str]:
        """Each package with its version, but for those that every environment has."""
        infos = (self.folder / environment / "lib").glob("python3.*/site-packages/*.dist-info")
        names = {info.name.removesuffix(".dist-info") for info in infos}
        return {name for name in names if not name.startswith(("pip-", "setuptools-"))}
