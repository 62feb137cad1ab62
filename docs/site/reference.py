"""Pages of the reference: one for each module of ``gspo``, from its docstrings, without importing it.

A module with ``__all__`` is public: its page documents what it lists, wherever that is defined. The modules behind such a
package have no pages of their own. ``gspo`` itself lists names that other pages explain. What begins with an underscore is
left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, TypeAlias

import griffe

Nav: TypeAlias = "list[dict[str, Any]]"
PACKAGE: Final = "gspo"


def reference(names: Path) -> tuple[dict[str, str], Nav]:
    """The pages by their paths, and their navigation. ``names``: the folder with the packages by their import names."""
    loader = griffe.GriffeLoader(search_paths=[names], allow_inspection=False)
    loader.load("gspo_services", try_relative_path=False)
    package = loader.load(PACKAGE, try_relative_path=False)
    loader.resolve_aliases(implicit=True)
    modules = list(modules_of(package))
    public = [each for each in modules if each.exports]
    inside = [each for each in modules if not each.exports]
    pages = {_path(each): _page(each) for each in modules}
    pages["api/index.md"] = "\n".join(
        [
            "# Reference", "", "What these modules list in `__all__` is public:", "", *_table(public), "",
            "## Inside", "", "The other modules may change in any release:", "", *_table(inside), "",
        ]
    )  # fmt: skip
    rooms: Nav = []
    for each in inside:
        room = ".".join(each.path.split(".")[:2])
        if each.is_init_module and each.path == room:
            rooms.append({room: [{room: _path(each)}]})
        elif each.path != room and room in rooms[-1]:
            rooms[-1][room].append({each.path: _path(each)})
        else:
            rooms.append({each.path: _path(each)})
    return pages, [{"Overview": "api/index.md"}, *({each.path: _path(each)} for each in public), {"Inside": rooms}]


def modules_of(module: griffe.Module) -> list[griffe.Module]:
    """This module and those in it that have pages, by name."""
    found = [module]
    if not module.exports or module.path == PACKAGE:
        for name, inner in sorted(module.modules.items()):
            if not name.startswith("_") and not inner.is_alias:
                found += modules_of(inner)
    return found


def _page(module: griffe.Module) -> str:
    lines = [f"# {module.path}", "", f"::: {module.path}"]
    exports = [str(each) for each in module.exports or ()]
    if module.path == PACKAGE:
        rows = [f"| [`{name}`][{module[name].canonical_path}] | {_summary(module[name])} |" for name in exports]
        lines += ["    options:", "      members: []", "", "| name | what it is |", "|---|---|", *rows]
    elif exports:
        lines += ["    options:", f"      members: [{', '.join(exports)}]"]
    inner = [each for each in modules_of(module)[1:] if each.path.rpartition(".")[0] == module.path]
    if inner and module.path != PACKAGE:
        lines += ["", "## Modules", "", *_table(inner)]
    return "\n".join([*lines, ""])


def _table(modules: list[griffe.Module]) -> list[str]:
    rows = [f"| [`{each.path}`]({each.path}.md) | {_summary(each)} |" for each in modules]
    return ["| module | what it has |", "|---|---|", *rows]


def _summary(documented: griffe.Object | griffe.Alias) -> str:
    """The first sentence of its docstring, for a row of a table."""
    text = documented.docstring.value if documented.docstring else ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def _path(module: griffe.Module) -> str:
    return f"api/{module.path}.md"
