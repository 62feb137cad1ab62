"""Makes an environment or a task set from its name and options in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from gspo.tasks.environments import Environment, TaskSet
from gspo_services.shared.runtime.user_modules import import_named

ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "arithmetic": "gspo_services.tasks.environments.arithmetic:Arithmetic",
        "calculator": "gspo_services.tasks.environments.calculator:Calculator",
        "code": "gspo_services.tasks.environments.coding:Code",
        "contest": "gspo_services.tasks.environments.coding:Contest",
        "dataset": "gspo_services.tasks.environments.dataset:Dataset",
        "math": "gspo_services.tasks.environments.maths:Mathematics",
        "reasoning_gym": "gspo_services.tasks.environments.gym:ReasoningGym",
    }
)
"""The environments that come with the project. A configuration names any other as "package.module:ClassName"."""

TASK_SETS: Mapping[str, str] = MappingProxyType(
    {
        "rows": "gspo_services.tasks.environments.rows:Rows",
        "shop": "gspo_services.tasks.environments.shop:Shop",
    }
)
"""The task sets that come with the project: an agent plays their tasks."""


def create_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """The environment called ``name``, or found at "package.module:ClassName", with checked ``options``.

    Options given as text (from an environment variable or a command line) are read as their field's type.
    Raises: ValueError for an unknown name, class, option or value; the text says what is allowed.
    """
    environment_class = find_environment(name)
    return environment_class(read_options(name, environment_class.options_type, options))


def create_task_set(name: str, options: Mapping[str, Any]) -> TaskSet:
    """The task set or environment called ``name``, for those who need only its tasks: the broker, and agents.

    Raises: as ``create_environment``.
    """
    task_set_class = find_task_set(name)
    return task_set_class(read_options(name, task_set_class.options_type, options))


def find_environment(name: str) -> type[Environment]:
    """The class behind ``name``; its module may lie beside the configuration.

    Raises: ValueError when there is no such module or class, or it is not an Environment.
    """
    found = find_task_set(name)
    if not issubclass(found, Environment):
        raise ValueError(
            f'environment "{name}" has tasks and nothing that plays them: name an agent in the section [agent], or use an '
            f"environment, which has start and step: {', '.join(sorted(ENVIRONMENTS))}"
        )
    return found


def find_task_set(name: str) -> type[TaskSet]:
    """The class behind ``name``, of a task set or an environment; its module may lie beside the configuration.

    Raises: ValueError when there is no such module or class, or it is neither.
    """
    path = ENVIRONMENTS.get(name) or TASK_SETS.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        environments, task_sets = ", ".join(sorted(ENVIRONMENTS)), ", ".join(sorted(TASK_SETS))
        raise ValueError(
            f'unknown environment "{name}": use one of {environments}, for an agent also {task_sets}, or '
            '"package.module:ClassName"'
        )
    try:
        module = import_named(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f'environment "{name}": {error}') from error
    found = vars(module).get(class_name)
    if not (isinstance(found, type) and issubclass(found, TaskSet)):
        raise ValueError(f'environment "{name}": {module_name} has no Environment or TaskSet class called {class_name}')
    return found


def read_options(name: str, options_type: type[msgspec.Struct], options: Mapping[str, Any]) -> msgspec.Struct:
    """``options`` as an ``options_type``. Raises: ValueError that names the environment, the option and what is allowed."""
    allowed = [field.name for field in msgspec.structs.fields(options_type)]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        names = ", ".join(allowed) if allowed else "none"
        raise ValueError(f'environment "{name}" has no option {", ".join(unknown)}: its options are {names}')
    try:
        return msgspec.convert(dict(options), options_type, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f'environment "{name}": {error}') from error
