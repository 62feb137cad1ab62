"""Whose rules a problem is judged by: how a Python program is run, and how what it says is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from gspo_services.tasks.environments.programs.comparison import same_output, same_value
from gspo_services.tasks.environments.programs.drivers import LIVECODEBENCH_DRIVER, NAMED_DRIVER
from gspo_services.tasks.environments.programs.public_rules import (
    code_contests_output,
    codeforces_output,
    livecodebench_output,
    livecodebench_result,
    prime_output,
    prime_result,
)

OwnerName = Literal["", "livecodebench", "codeforces", "prime", "code_contests"]
""""" for rows of your own; the others are the owners of public sets."""

Comparison = Callable[[Any, Any, float], bool]
"""Expected, said, and the tolerance of the environment, which only rows of your own have."""


@dataclass(frozen=True, kw_only=True)
class OwnersRules:
    """The rules of one owner."""

    same_output: Comparison
    """Of texts."""
    same_result: Comparison = same_value
    """Of the results of a function."""
    results_as_json: bool = True
    """Tuples, sets and other sequences come as lists."""
    driver: str = ""
    """The script that runs a Python program that reads and prints; "" for the program as it is."""


def _exactly(compare: Callable[[Any, Any], bool]) -> Comparison:
    return lambda expected, said, _tolerance: compare(expected, said)


OWNERS: Final[Mapping[str, OwnersRules]] = MappingProxyType(
    {
        "": OwnersRules(same_output=same_output),
        "livecodebench": OwnersRules(
            same_output=_exactly(livecodebench_output),
            same_result=_exactly(livecodebench_result),
            results_as_json=False,
            driver=LIVECODEBENCH_DRIVER,
        ),
        "codeforces": OwnersRules(same_output=_exactly(codeforces_output)),
        "prime": OwnersRules(
            same_output=_exactly(prime_output),
            same_result=_exactly(prime_result),
            results_as_json=False,
            driver=NAMED_DRIVER,
        ),
        "code_contests": OwnersRules(same_output=_exactly(code_contests_output)),
    }
)
"""By ``OwnerName``."""
