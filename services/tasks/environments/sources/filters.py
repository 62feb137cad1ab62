"""Which rows are worth sampling: by the length of their prompt, and by how often they were solved before."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from gspo_services.tasks.environments.sources.columns import column_of

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class RowFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows outside these bounds are left out, and counted. A row without the column of the pass rate is a bad row."""

    min_chars: _Count = 0
    """The fewest characters of a prompt; of a row, all its text, where there is no prompt column."""
    max_chars: _Count | None = None
    """The most, likewise."""
    pass_rate_column: str = ""
    """A column with the share of earlier attempts that solved the task, from 0 to 1."""
    min_pass_rate: _Share = 0.0
    max_pass_rate: _Share = 1.0

    def __post_init__(self) -> None:
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"filter.max_chars is {self.max_chars} and min_chars is {self.min_chars}: no row would be left")
        if self.max_pass_rate < self.min_pass_rate:
            raise ValueError(
                f"filter.max_pass_rate is {self.max_pass_rate} and min_pass_rate is {self.min_pass_rate}: no row would be "
                "left"
            )
        if not self.pass_rate_column and (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0):
            raise ValueError("filter.min_pass_rate and max_pass_rate need pass_rate_column: name the column of the rate")

    def keeps(self, record: dict[str, Any], num_chars: int) -> bool:
        """Whether the row is sampled. Raises: ValueError for a pass rate that is none."""
        if num_chars < self.min_chars or (self.max_chars is not None and num_chars > self.max_chars):
            return False
        if not self.pass_rate_column:
            return True
        rate = column_of(record, self.pass_rate_column, "filter.pass_rate_column says")
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate)
        if not is_number or not 0 <= rate <= 1:
            raise ValueError(f'column "{self.pass_rate_column}" is {repr(rate)[:100]}: expected a share from 0 to 1')
        return bool(self.min_pass_rate <= rate <= self.max_pass_rate)
