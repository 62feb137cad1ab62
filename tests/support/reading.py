"""Python that is shown and not run here: its names, and what the real modules say of attributes, arguments and imports.

What cannot be known without running it, such as an element of a list or another project's class, is taken as it stands.
"""

import ast
import builtins
import importlib
import importlib.util
import inspect
import textwrap
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

UNKNOWN: Final = object()
OURS: Final = ("gspo", "gspo_protocol", "gspo_services", "examples", "benchmarks")


@dataclass(frozen=True)
class Of:
    """A value of which the class alone is known."""

    type: type


def read(text: str, given: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a program, and the names that it leaves. ``given``: names that it may use, with their values.

    Raises: SyntaxError.
    """
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(text, "shown", "exec", flags)
    # A fragment may return, too, which is an error at the top of a module and not in a function.
    body = (
        text
        if not any(isinstance(each, ast.Return) for each in tree.body)
        else "async def shown():\n" + textwrap.indent(text, "    ")
    )
    compile(body, "shown", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    # A loop may use what its last pass has set.
    stored = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    reader = Reader(dict.fromkeys(stored, UNKNOWN) | dict(given))
    reader.visit(tree)
    return reader.wrong, reader.names


class Reader(ast.NodeVisitor):
    """Goes through a program in the order of its lines."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.wrong: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = self._module(alias.name)
            self.names[alias.asname or alias.name.partition(".")[0]] = module

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self._module(node.module or "")
        for alias in node.names:
            self.names[alias.asname or alias.name] = self._attribute(module, alias.name)

    def _module(self, name: str) -> Any:
        root = name.partition(".")[0]
        if root not in OURS and importlib.util.find_spec(root) is None:
            return UNKNOWN  # Its own tests run it.
        try:
            return importlib.import_module(name)
        except ImportError as error:
            self.wrong.append(str(error))
            return UNKNOWN

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names[node.name] = UNKNOWN
        outside = self.names
        arguments = node.args
        every = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *filter(None, (arguments.vararg, arguments.kwarg)),
        ]
        # An argument that is called as a value that is given is that value.
        self.names = outside | {each.arg: outside.get(each.arg, UNKNOWN) for each in every}
        self.generic_visit(node)
        self.names = outside

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names[node.name] = UNKNOWN
        outside = self.names
        self.names = dict(outside)
        self.generic_visit(node)
        self.names = outside

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._bind(target, value)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self.value(node.iter)
        self._bind(node.target, UNKNOWN)
        for each in node.ifs if isinstance(node, ast.comprehension) else [*node.body, *node.orelse]:
            self.visit(each)

    visit_comprehension = visit_For  # type: ignore[assignment]

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value)
        for statement in node.body:
            self.visit(statement)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, self.value(node.value))

    def visit_ListComp(self, node: Any) -> None:
        outside = self.names
        self.names = dict(outside)
        for generator in node.generators:
            self.visit(generator)
        for each in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(each)
        self.names = outside

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_FunctionDef(ast.FunctionDef("lambda", node.args, [ast.Expr(node.body)], []))

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Await):
            super().generic_visit(node)
        elif isinstance(node, ast.expr):
            self.value(node)
        else:
            super().generic_visit(node)

    def _bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._bind(each, UNKNOWN)
        else:
            self.generic_visit(target)

    def value(self, node: ast.expr) -> Any:
        """What is known of an expression's value; looks at all that is in it."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                if name not in self.names and not hasattr(builtins, name):
                    self.wrong.append(f"no name {name}")
                return self.names.get(name, getattr(builtins, name, UNKNOWN))
            case ast.Name():
                return UNKNOWN
            case ast.Attribute(value=owner, attr=attribute):
                return self._attribute(self.value(owner), attribute)
            case ast.Await(value=awaited):
                return self.value(awaited)
            case ast.Call():
                return self._result(node)
        self.visit(node)
        return UNKNOWN

    def _attribute(self, owner: Any, name: str) -> Any:
        """Raises nothing: an attribute that is not there is noted."""
        if owner is UNKNOWN:
            return UNKNOWN
        if isinstance(owner, Of):
            hints = _hints(owner.type)
            if name in hints and not callable(getattr(owner.type, name, None)):
                return _of(hints[name])
            found = inspect.getattr_static(owner.type, name, UNKNOWN)
            if isinstance(found, property):
                return _of(_hints(found.fget).get("return"))
            if found is UNKNOWN and name not in _assigned(owner.type):
                self.wrong.append(f"{owner.type.__name__} has no {name}")
                return UNKNOWN
            return getattr(owner.type, name, UNKNOWN)
        if isinstance(owner, ModuleType):
            with suppress(ImportError):
                importlib.import_module(f"{owner.__name__}.{name}")
        if not hasattr(owner, name):
            self.wrong.append(f"{getattr(owner, '__name__', owner)} has no {name}")
        return getattr(owner, name, UNKNOWN)

    def _result(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        for each in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.value(each.value if isinstance(each, ast.Starred) else each)
        if function is UNKNOWN or isinstance(function, Of) or not callable(function):
            return UNKNOWN
        open_ended = any(isinstance(each, ast.Starred) for each in node.args) or any(
            each.arg is None for each in node.keywords
        )
        if getattr(function, "__module__", "").partition(".")[0] in OURS and not open_ended:
            self._require_arguments(function, node)
        return _of(function) if isinstance(function, type) else _of(_hints(function).get("return"), function)

    def _require_arguments(self, function: Any, node: ast.Call) -> None:
        signature = inspect.signature(function)
        is_method = (
            inspect.isfunction(function) and "." in function.__qualname__ and next(iter(signature.parameters), "") == "self"
        )
        try:
            signature.bind(*[None] * (is_method + len(node.args)), **{str(each.arg): None for each in node.keywords})
        except TypeError as error:
            self.wrong.append(f"{function.__qualname__}: {error}")


def _of(hint: Any, method: Any = None) -> Any:
    if hint is typing.Self:
        hint = getattr(method, "__self__", UNKNOWN)
    return Of(hint) if isinstance(hint, type) and hint.__module__.partition(".")[0] in OURS else UNKNOWN


def _hints(owner: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner)
    except (NameError, TypeError):
        return {}


def _assigned(owner: type) -> set[str]:
    """Attributes that its methods give themselves."""
    found: set[str] = set()
    for each in owner.__mro__[:-1]:
        with suppress(OSError, TypeError):
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
            found |= {
                part.attr for part in ast.walk(tree) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
            }
    return found
