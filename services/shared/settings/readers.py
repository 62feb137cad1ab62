"""Finds in the sources which process reads which setting, for docs/settings.md and its test.

Types are followed from annotations: a parameter ``settings: Settings``, an attribute ``self._learner = settings.learner``,
a class with a field ``learner: Learner``, a function that returns ``EngineSettings``. Each read of a section's attribute
counts for the process that has the code in its folder. Reads in shared code count for the processes that import it.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from gspo_services.shared.settings.keys import all_keys, defining_classes, section_names

PROCESSES: Final = {
    "services/broker": "broker",
    "services/rollout": "rollout",
    "services/learner": "learner",
    "services/serve": "serve",
    "services/runs/track": "trackers",
    "services/tasks/sandbox/server": "sandbox",
    "services/cli": "commands",
    "services/runs/eval": "commands",
    "services/runs": "commands",
}
"""The process of each folder; the rest is shared."""

_DEFINITIONS: Final = (
    "services/shared/settings/", "services/prepare/check/", "services/prepare/cluster_check/", "services/shared/estimates/",
    "services/prepare/init/",
)  # fmt: skip
"""Code that defines, checks and chooses settings does not count as reading them: a run would not miss it."""

_Scope = dict[str, str]
"""The class of each name."""


@dataclass(frozen=True, kw_only=True)
class _Module:
    path: str
    tree: ast.Module

    @property
    def process(self) -> str | None:
        return next((name for folder, name in PROCESSES.items() if self.path.startswith(f"{folder}/")), None)


@dataclass(frozen=True, kw_only=True)
class _Read:
    key: str
    module: _Module
    definition: str
    """The function or class of the module that reads it."""


@dataclass(frozen=True)
class _Types:
    """The annotations by bare name: no two classes in the sources share a name and both lead to a setting."""

    attributes: dict[str, _Scope] = field(default_factory=lambda: defaultdict(dict))
    """The class of each attribute, by the class that has it."""
    results: _Scope = field(default_factory=dict)
    """The class that each function returns."""

    def of(self, expression: ast.expr, scope: _Scope) -> str | None:
        """Return the class of an expression, if annotations tell it."""
        match expression:
            case ast.Name(id=name):
                return scope.get(name)
            case ast.Attribute(value=base, attr=name):
                owner = self.of(base, scope)
                return self.attributes[owner].get(name) if owner in self.attributes else None
            case ast.Call(func=ast.Name(id=name)):
                return name if name in self.attributes else self.results.get(name)
            case ast.IfExp(body=body):
                return self.of(body, scope)
        return None


class _Walk(ast.NodeVisitor):
    """One module: learns types and collects reads."""

    def __init__(self, module: _Module, types: _Types, sections: dict[str, str]) -> None:
        self.reads: list[_Read] = []
        self._module = module
        self._types = types
        self._sections = sections
        self._scopes: list[_Scope] = [{}]
        self._classes: list[str] = []
        self._definitions: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node.name)
        self._types.attributes.setdefault(node.name, {})
        for each in node.body:
            match each:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    self._learn(self._types.attributes[node.name], name, _annotated(annotation))
                case ast.FunctionDef(name=name, returns=ast.expr() as annotation):
                    if any(isinstance(each, ast.Name) and each.id == "property" for each in each.decorator_list):
                        self._learn(self._types.attributes[node.name], name, _annotated(annotation))
        self._inside(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.returns is not None and not self._classes:
            self._learn(self._types.results, node.name, _annotated(node.returns))
        scope = dict(self._scopes[-1])
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            scope.pop(argument.arg, None)
            if argument.annotation is not None:
                self._learn(scope, argument.arg, _annotated(argument.annotation))
        if self._classes and arguments and arguments[0].arg == "self":
            scope["self"] = self._classes[-1]
        self._scopes.append(scope)
        if node.name != "__post_init__":  # Checks, as in pydantic's sections.
            self._inside(node)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        section = self._sections.get(self._types.of(node.value, self._scopes[-1]) or "")
        if section is not None:
            definition = self._definitions[0] if self._definitions else ""
            self.reads.append(_Read(key=f"{section}.{node.attr}", module=self._module, definition=definition))
        self.generic_visit(node)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._definitions.append(node.name)
        self.generic_visit(node)
        self._definitions.pop()

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                for one, other in zip(targets, values, strict=False):
                    self._assign(one, other)
            case ast.Name(id=name), _:
                self._learn(self._scopes[-1], name, self._types.of(value, self._scopes[-1]))
            case ast.Attribute(value=ast.Name(id="self"), attr=name), _ if self._classes:
                found = self._types.of(value, self._scopes[-1])
                self._learn(self._types.attributes[self._classes[-1]], name, found)

    def _learn(self, scope: _Scope, name: str, found: str | None) -> None:
        if found is not None:
            scope[name] = found


@cache
def readers(root: Path) -> dict[str, tuple[str, ...]]:
    """Return the processes that read each setting, in the sources below ``root``; "commands" are ``gspo`` commands."""
    paths = sorted(path for folder in ("services", "gspo") for path in (root / folder).rglob("*.py"))
    modules = [
        _Module(path=path.relative_to(root).as_posix(), tree=ast.parse(path.read_text(encoding="utf-8"))) for path in paths
    ]
    sections = {each.__name__: section for section in section_names() for each in defining_classes(section)}
    types = _Types()
    for _ in range(2):  # Twice, because a module may use a class that a later one defines.
        walks = [_Walk(module, types, sections) for module in modules]
        for walk in walks:
            walk.visit(walk._module.tree)
    users = _Users(modules)
    found: dict[str, set[str]] = {key: set() for key in all_keys()}
    for read in (read for walk in walks for read in walk.reads):
        if read.key in found and not read.module.path.startswith(_DEFINITIONS):
            found[read.key] |= users.of(read.module, read.definition)
    order = list(dict.fromkeys(PROCESSES.values()))
    return {key: tuple(sorted(processes, key=order.index)) for key, processes in found.items()}


class _Users:
    """Finds the processes that use a function or class, directly or through shared code."""

    def __init__(self, modules: Iterable[_Module]) -> None:
        self._mentions: dict[str, list[tuple[_Module, str]]] = defaultdict(list)
        """By name: the definitions that use it, where it is imported or defined."""
        for module in modules:
            if module.path.startswith(_DEFINITIONS):
                continue
            known = {name for node in ast.walk(module.tree) for name in _introduced(node)}
            for definition in module.tree.body:
                own = "" if isinstance(definition, ast.ImportFrom) else next(_introduced(definition), "")
                for name in known & {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}:
                    self._mentions[name].append((module, own))

    def of(self, module: _Module, definition: str) -> set[str]:
        """Return the processes that use a definition of this module; its own process if it has one."""
        found, seen, open_ = set(), {definition}, [(module, definition)]
        while open_:
            module, definition = open_.pop()
            if module.process is not None:
                found.add(module.process)
                continue
            for user, name in self._mentions[definition]:
                if (user.process is not None or name not in seen) and name != definition:
                    seen.add(name)
                    open_.append((user, name))
        return found


def _introduced(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement brings into a module."""
    if isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name


def _annotated(annotation: ast.expr) -> str | None:
    """Return the class that an annotation names: ``X``, ``"X"`` or ``X | None``."""
    match annotation:
        case ast.Name(id=name):
            return name
        case ast.Constant(value=str(name)):
            return name
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return _annotated(left)
    return None
