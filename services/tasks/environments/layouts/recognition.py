"""Which layout a row has, by its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from gspo_services.tasks.environments.layouts.apps import APPS_COLUMNS, apps_row
from gspo_services.tasks.environments.layouts.code_contests import CODE_CONTESTS_COLUMNS, code_contests_row
from gspo_services.tasks.environments.layouts.codeforces import CODEFORCES_COLUMNS, codeforces_row
from gspo_services.tasks.environments.layouts.deepcoder import DEEPCODER_COLUMNS, deepcoder_row
from gspo_services.tasks.environments.layouts.livecodebench import LIVECODEBENCH_COLUMNS, livecodebench_row
from gspo_services.tasks.environments.layouts.plain import OWN_COLUMNS, own_row
from gspo_services.tasks.environments.layouts.primeintellect import PRIMEINTELLECT_COLUMNS, primeintellect_row
from gspo_services.tasks.environments.layouts.program_rows import ProgramRow
from gspo_services.tasks.environments.layouts.verl import VERL_COLUMNS, verl_row

LayoutName = Literal[
    "", "own", "livecodebench", "apps", "codeforces", "code_contests", "deepcoder", "primeintellect", "verl"
]
"""How rows are laid out; "" recognises them by their columns."""


@dataclass(frozen=True, kw_only=True)
class ProgramLayout:
    """Columns that tell a layout, and how its rows are read."""

    columns: frozenset[str]
    read: Callable[[Mapping[str, Any]], ProgramRow]


LAYOUTS: Mapping[LayoutName, ProgramLayout] = MappingProxyType(
    {
        "own": ProgramLayout(columns=OWN_COLUMNS, read=own_row),
        "livecodebench": ProgramLayout(columns=LIVECODEBENCH_COLUMNS, read=livecodebench_row),
        "apps": ProgramLayout(columns=APPS_COLUMNS, read=apps_row),
        "codeforces": ProgramLayout(columns=CODEFORCES_COLUMNS, read=codeforces_row),
        "code_contests": ProgramLayout(columns=CODE_CONTESTS_COLUMNS, read=code_contests_row),
        "deepcoder": ProgramLayout(columns=DEEPCODER_COLUMNS, read=deepcoder_row),
        "primeintellect": ProgramLayout(columns=PRIMEINTELLECT_COLUMNS, read=primeintellect_row),
        "verl": ProgramLayout(columns=VERL_COLUMNS, read=verl_row),
    }
)


def program_row(record: Mapping[str, Any], layout: LayoutName) -> ProgramRow:
    """The problem of a row. Raises: ValueError with what is wrong, or with the known layouts when the row has none of
    them."""
    return LAYOUTS[layout or recognised(record)].read(record)


def recognised(record: Mapping[str, Any]) -> LayoutName:
    """The layout of a row. Raises: ValueError with the known layouts when the row has none of them."""
    for name, known in LAYOUTS.items():
        if known.columns <= record.keys():
            return name
    expected = "; ".join(f"{name}: {', '.join(sorted(known.columns))}" for name, known in LAYOUTS.items())
    raise ValueError(
        f"its columns ({', '.join(sorted(map(str, record)))[:300]}) are those of no layout that is known ({expected})"
    )
