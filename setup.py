"""What pyproject.toml cannot say: packages with other import names than their folders, and files from outside them."""

import tempfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = {"gspo_services": "services", "gspo_protocol": "protocol"}
LISTS = [f"requirements/{name}.txt" for name in ("pip", "torch-cpu", "torch-cuda", "cpu", "gpu", "deepspeed")]
LISTS += [f"requirements/setup/{name}.py" for name in ("install", "pip_calls", "preflight", "pytorch")]
BUILD = tempfile.TemporaryDirectory(prefix="gspo-build-")  # removed when this process ends


class BuildWithLists(build_py):
    """Puts the lists that `gspo setup` installs, and what installs them, into wheel and sdist. An image has some of them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.mkpath(f"{self.build_lib}/gspo_services/requirements/setup")
            for name in filter(lambda name: Path(name).exists(), LISTS):
                self.copy_file(name, f"{self.build_lib}/gspo_services/{name}")

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *LISTS]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(f"{self.build_lib}/gspo_services/{name}" for name in LISTS)]


setup(
    packages=[
        *find_packages(include=["gspo", "gspo.*"]),
        *FOLDERS,
        *(f"{name}.{inner}" for name, folder in FOLDERS.items() for inner in find_packages(folder)),
    ],
    package_dir=FOLDERS,
    cmdclass={"build_py": BuildWithLists},
    # A fresh folder: leftovers in build/ would get into the wheel, and pip takes gspo.egg-info for an installation.
    options={"build": {"build_base": BUILD.name}, "egg_info": {"egg_base": BUILD.name}},
)
