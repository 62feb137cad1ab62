"""Only the list of packages: setuptools finds packages by their folders' names, and two of ours have other import names."""

import tempfile

from setuptools import find_packages, setup

FOLDERS = {"gspo_services": "services", "gspo_protocol": "protocol"}
BUILD = tempfile.TemporaryDirectory(prefix="gspo-build-")  # removed when this process ends

setup(
    packages=[
        *find_packages(include=["gspo", "gspo.*"]),
        *FOLDERS,
        *(f"{name}.{inner}" for name, folder in FOLDERS.items() for inner in find_packages(folder)),
    ],
    package_dir=FOLDERS,
    # A fresh folder: leftovers in build/ would get into the wheel, and pip takes gspo.egg-info for an installation.
    options={"build": {"build_base": BUILD.name}, "egg_info": {"egg_base": BUILD.name}},
)
