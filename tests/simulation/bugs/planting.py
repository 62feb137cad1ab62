"""Bugs to plant in the services: each breaks one promise, and the audit must find it.

A bug is a change of source text. The module is compiled again with it, and the functions that differ lend their code to the
real ones while the bug is planted: nothing on disk changes, and a module that has already imported a function runs the bug,
too.
"""

import importlib
import inspect
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from tests.simulation.plan import Agents, Event, Plan
from tests.simulation.weather import plan_of


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One bug. ``invariants``: beginnings of the names under which it may be caught. ``weather`` is added to a plan's own,
    so that what the bug needs happens soon."""

    name: str
    module: str
    old: str
    new: str
    invariants: tuple[str, ...]
    weather: tuple[Event, ...] = ()
    seed: int = 0
    """The first seed that shows it: a change of the services may need another one (``test_a_planted_bug_is_found``)."""
    agents: Agents = ""
    """Whether agents play the episodes (``Plan.agents``)."""
    compares: bool = False
    """Whether groups are graded together (``Plan.compares``)."""
    reads_clock: bool = False
    part_tokens: int | None = None
    """Tokens of a batch's parts; None: as the seed has it."""
    is_deterministic: bool | None = None
    """Whether training is; None: as the seed has it."""

    def plan(self, seed: int) -> Plan:
        """The run of a seed, in this bug's weather."""
        plan = replace(
            plan_of(seed, may_have_agents=bool(self.agents), may_be_stopped=False),
            agents=self.agents,
            compares=self.compares,
            reads_clock=self.reads_clock,
        )
        if self.part_tokens is not None:
            plan = replace(plan, part_tokens=self.part_tokens)
        if self.is_deterministic is not None:
            plan = replace(plan, is_deterministic=self.is_deterministic)
        # A rollout that this run does not have cannot be killed.
        weather = [event for event in self.weather if not any(name in event.target for name in _rollouts_after(plan))]
        return plan.with_events(tuple(sorted((*plan.events, *weather), key=lambda event: event.at)))


def _rollouts_after(plan: Plan) -> list[str]:
    """Names of a few rollouts that larger runs have."""
    return [f"rollout-{number}" for number in range(plan.num_rollouts, plan.num_rollouts + 8)]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Plant ``bug`` in the services inside this block. Raises: ValueError when its text is not there exactly once, or in no
    function."""
    module = importlib.import_module(bug.module)
    source = inspect.getsource(module)
    if source.count(bug.old) != 1:
        raise ValueError(f"bug {bug.name!r}: {bug.module} has its text {source.count(bug.old)} times, expected once")
    before, after = (_codes(text, bug.module) for text in (source, source.replace(bug.old, bug.new)))
    changed = [
        (function, after[name])
        for name, function in _functions(module).items()
        if name in after and after[name] != before[name]
    ]
    if not changed:
        raise ValueError(f"bug {bug.name!r}: its text is in no function or method of {bug.module}, so nothing would change")
    with ExitStack() as stack:
        for function, code in changed:
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
        yield


def _codes(source: str, name: str) -> dict[str, types.CodeType]:
    """Code of every function and method, by qualified name, without line numbers."""
    found: dict[str, types.CodeType] = {}

    def collect(code: types.CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                found[constant.co_qualname] = constant
                collect(constant)

    collect(compile(source, name, "exec", dont_inherit=True))
    return found


def _functions(module: types.ModuleType) -> dict[str, types.FunctionType]:
    found: dict[str, types.FunctionType] = {}
    owners: list[object] = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for value in vars(owner).values():
            function = value.fget if isinstance(value, property) else value
            function = function.func if isinstance(function, cached_property) else function
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                found[function.__qualname__] = function
    return found
