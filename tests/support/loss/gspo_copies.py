"""The library as a value: the modules that a property calls, imported unchanged or from changed source text.

A copy is imported from text in memory, next to the real package; the files stay untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

import gspo.adaptive
import gspo.advantages
import gspo.diagnostics
import gspo.loss
import gspo.mismatch
import gspo.settings
import gspo.staleness

PACKAGE = Path(gspo.__file__).parent


@dataclass(frozen=True)
class Gspo:
    """The modules under test."""

    loss: ModuleType
    staleness: ModuleType
    mismatch: ModuleType
    advantages: ModuleType
    diagnostics: ModuleType
    settings: ModuleType
    adaptive: ModuleType


GSPO = Gspo(gspo.loss, gspo.staleness, gspo.mismatch, gspo.advantages, gspo.diagnostics, gspo.settings, gspo.adaptive)


def source_of(file: str) -> str:
    """Return the text of gspo/<file>."""
    return (PACKAGE / file).read_text(encoding="utf-8")


def copy_of_gspo(changed: Mapping[str, str]) -> Gspo:
    """Import a private copy of the package with the files ``changed`` (name: source text) replaced."""
    finder = _FromText({f"gspo.{file.removesuffix('.py').replace('/', '.')}": text for file, text in changed.items()})
    originals = {name: module for name, module in sys.modules.items() if name == "gspo" or name.startswith("gspo.")}
    for name in originals:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        return Gspo(*(import_module(f"gspo.{name}") for name in Gspo.__dataclass_fields__))
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name == "gspo" or name.startswith("gspo.")]:
            del sys.modules[name]
        sys.modules.update(originals)


def _path(module: str) -> str:
    """Of a module inside the package's folder, without its suffix."""
    return module.removeprefix("gspo").removeprefix(".").replace(".", "/")


_compiled: dict[str, CodeType] = {}
"""Code of the unchanged files: executed again for every copy, compiled once."""


class _FromText(MetaPathFinder, Loader):
    def __init__(self, changed: Mapping[str, str]) -> None:
        self._changed = changed

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "gspo" and not fullname.startswith("gspo."):
            return None
        return spec_from_loader(fullname, self, is_package=(PACKAGE / _path(fullname)).is_dir())

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self._changed:
            code = compile(self._changed[name], f"<changed {name}>", "exec")
        else:
            if name not in _compiled:
                path = _path(name)
                file = (f"{path}/" if path else "") + "__init__.py" if (PACKAGE / path).is_dir() else f"{path}.py"
                _compiled[name] = compile(source_of(file), f"<copy of {name}>", "exec")
            code = _compiled[name]
        exec(code, module.__dict__)
