"""Any value and any error, made from a recipe of plain data: so that workers and agents can return or raise it.

A recipe is {"return": VALUE} or {"raise": ERROR}. VALUE is a name of ``VALUES``, or {"base": a name of ``BASES``, "methods":
{name: recipe}}: an object whose methods return and raise what they like. ERROR is a name of ``ERRORS``, or such an object.
"""

import asyncio
import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from gspo.tasks.agents import Episode
from gspo.tasks.environments import RewardJob, Step
from gspo_services.tasks.worker.reward_value import UnscoredError

DEEP = 100_000


def nested(kind: Callable[[Any], Any]) -> Any:
    """A value in ``DEEP`` others."""
    value: Any = 1.0
    for _ in range(DEEP):
        value = kind(value)
    return value


def in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def long_generator() -> Iterator[tuple[str, float]]:
    for number in range(1000):
        yield str(number), 1.0


async def never_awaited() -> float:
    return 1.0


class Odd:
    """The base of objects that lie."""


class Table(Mapping[str, float]):
    """A mapping of one component, unless its methods are others."""

    def __getitem__(self, name: str) -> float:
        return 0.5

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "one": lambda: 1,
    "half": lambda: 0.5,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "largest": lambda: sys.float_info.max,
    "a million": lambda: 1e6,
    "int that no float holds": lambda: 10**400,
    "int that does not print": lambda: -(10**5000),
    "signalling nan": lambda: Decimal("sNaN"),
    "huge decimal": lambda: Decimal("9e999999"),
    "tiny decimal": lambda: Decimal("1e-999999"),
    "huge fraction": lambda: Fraction(10**400, 3),
    "complex": lambda: 1j,
    "text": lambda: "1.0",
    "surrogates": lambda: "\ud800 \udfff",
    "long text": lambda: "9" * 1_000_000,
    "bytes": lambda: b"\xff",
    "list": lambda: [1.0],
    "deep list": lambda: nested(lambda inner: [inner]),
    "deep dict": lambda: nested(lambda inner: {"a": inner}),
    "deep tuple": lambda: nested(lambda inner: (inner,)),
    "list in itself": in_itself,
    "no components": dict,
    "huge components": lambda: {"a": sys.float_info.max, "b": sys.float_info.max},
    "components that cancel out": lambda: {"a": sys.float_info.max, "b": sys.float_info.max, "c": -sys.float_info.max},
    "many components": lambda: dict.fromkeys(map(str, range(1000)), 1.0),
    "component with a surrogate": lambda: {"\ud800": 1.0},
    "component of a component": lambda: {"a": {"b": 1.0}},
    "key that is no text": lambda: {None: 1.0, (1, 2): 2.0},
    "generator": long_generator,
    "coroutine of the class": lambda: never_awaited,
    "class": lambda: Odd,
    "module": lambda: builtins,
    "error": lambda: ValueError("returned, not raised"),
    "error's class": lambda: KeyboardInterrupt,
    "not implemented": lambda: NotImplemented,
    "numpy void": lambda: np.zeros(1, "i4,f4")[0],
    "numpy date": lambda: np.datetime64("NaT"),
    "numpy nan": lambda: np.float16("nan"),
    "numpy number": lambda: np.int8(1),
    "numpy array": lambda: np.ones((2, 3)),
    "numpy object": lambda: np.array(Odd(), dtype=object),
    "numpy huge": lambda: np.longdouble("1e4000"),
}


def _raises_itself() -> BaseException:
    class Circular(Exception):
        pass

    error = Circular("in itself")
    error.exceptions = (error,)  # type: ignore[attr-defined]
    error.__cause__ = error
    return error


def _out_of_depth() -> BaseException:
    def deeper() -> None:
        deeper()

    try:
        deeper()
    except RecursionError as error:
        return error
    raise AssertionError("Python has an end")


def _of(kind: type[BaseException]) -> Callable[[], BaseException]:
    def make() -> BaseException:
        if issubclass(kind, BaseExceptionGroup):
            return kind("several", [ValueError("first"), TypeError("second")])
        if issubclass(kind, UnicodeError) and kind is not UnicodeError:
            return (
                kind("utf-8", *(("é", 0, 1) if kind is UnicodeEncodeError else (b"\xff", 0, 1)), "why")
                if (kind is not UnicodeTranslateError)
                else kind("é", 0, 1, "why")
            )
        return kind("said so")

    return make


ERRORS: dict[str, Callable[[], BaseException]] = {
    **{
        kind.__name__: _of(kind)
        for kind in vars(builtins).values()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    },
    "CancelledError": lambda: asyncio.CancelledError("by nobody"),
    "UnscoredError": lambda: UnscoredError("no such reason", "said so"),  # type: ignore[arg-type]
    "surrogates": lambda: ValueError("\ud800"),
    "long text": lambda: ValueError("x" * 1_000_000),
    "many lines": lambda: ValueError("\n" * 1000),
    "in itself": _raises_itself,
    "out of depth": _out_of_depth,
    "not finite json": lambda: ValueError(float("nan")),
}

BASES: dict[str, type] = {
    "object": Odd, "mapping": Table, "dict": dict, "list": list, "str": str, "float": float, "int": int, "Decimal": Decimal,
}  # fmt: skip
METHODS = (
    "__float__", "__int__", "__index__", "__bool__", "__len__", "__iter__", "__eq__", "__hash__", "__repr__",
    "__str__", "__format__", "__getattr__", "__getattribute__", "__getitem__", "__contains__",
    "__class__", "__await__", "__call__", "__reduce_ex__", "__deepcopy__", "__iadd__", "shape", "item", "items", "keys",
    "values",
)  # fmt: skip
_PROPERTIES = frozenset({"__class__", "shape"})
_PLAIN_GETATTRIBUTE = object.__getattribute__


def made(recipe: Any) -> Any:
    """What a recipe returns. Raises: what it raises."""
    if "raise" in recipe:
        raise _error(recipe["raise"])
    value = recipe["return"]
    return VALUES[value]() if isinstance(value, str) else _object(value)


def _error(name: Any) -> BaseException:
    if isinstance(name, str):
        return ERRORS[name]()
    kind: Any = type("Liar", (Exception,), _namespace({**name["methods"]}))
    error: BaseException = kind("said so")
    return error


def _object(description: Mapping[str, Any]) -> Any:
    base = BASES[description["base"]]
    return type("Liar", (base,), _namespace(description["methods"]))()


def _namespace(methods: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, recipe in methods.items():
        method = _method(name, recipe)
        found[name] = property(method) if name in _PROPERTIES else method
    return found


def _method(name: str, recipe: Any) -> Callable[..., Any]:
    if name == "__getattribute__":
        # Whatever a class itself needs must be there, or there would be no object.
        return lambda self, asked: _PLAIN_GETATTRIBUTE(self, asked) if asked.startswith("__") else made(recipe)
    return lambda *_, **__: made(recipe)


# --- the makers of scores ---------------------------------------------------------------------------------------------


def grade(recipe: Any, task: Any = None) -> Any:
    """A reward function."""
    return made(recipe)


async def grade_later(recipe: Any, task: Any = None) -> Any:
    """An asynchronous one."""
    await asyncio.sleep(0)
    return made(recipe)


async def solve(episode: Episode) -> Any:
    """An agent that has asked the policy nothing."""
    return made(episode.task["recipe"])


def step_of(part: str, recipe: Any, action: str) -> Any:
    """What an environment's step returns, where ``part`` of it is made by the recipe."""
    if part == "step":
        return made(recipe)
    fields: dict[str, Any] = {"state": {}, "messages": [], "reward": 1.0, "done": True}
    if part.startswith("job."):
        part = part.removeprefix("job.")
        # Short, because a service at any address is asked until then.
        job: dict[str, Any] = {
            "deadline_s": 1.0,
            "function": "tests.support.rewards.anything:grade",
            "arguments": {"recipe": {"return": "one"}},
        }
        if part in ("url", "grader"):
            del job["function"]
        fields["reward"] = RewardJob(**{**job, part: made(recipe)})
    else:
        fields[part] = made(recipe)
    if part == "messages":
        fields["done"] = False
    return Step(**fields)


STEP_PARTS = (
    "step", "state", "messages", "reward", "done", "job.arguments", "job.weights", "job.deadline_s", "job.function",
    "job.url", "job.grader",
)  # fmt: skip
