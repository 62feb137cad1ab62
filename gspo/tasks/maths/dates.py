"""Days of the calendar, however they are written: 5 March 2020, March 5th, 2020, 2020-03-05."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_MONTHS: Final = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november", "december",
)  # fmt: skip
_NAMED: Final = "|".join(
    f"{name[:3]}(?:{name[3:]}|t)?" if name == "september" else f"{name[:3]}(?:{name[3:]})?" for name in _MONTHS
)
_DAY: Final = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR: Final = r"(?P<year>\d{4})"
_WRITTEN: Final = (
    re.compile(rf"(?P<name>{_NAMED})\.? {_DAY}(?:,? {_YEAR})?", re.IGNORECASE),
    re.compile(rf"(?:the )?{_DAY} (?:of )?(?P<name>{_NAMED})\.?(?:,? {_YEAR})?", re.IGNORECASE),
    re.compile(rf"{_YEAR}([-/.])(?P<month>\d{{1,2}})\2(?P<day>\d{{1,2}})"),
)
_WEEKDAY: Final = re.compile(r"(?:mon|tues|wednes|thurs|fri|satur|sun)day,? ", re.IGNORECASE)


class Day(NamedTuple):
    """A date."""

    year: int | None
    month: int
    day: int


def day_in(text: str) -> Day | None:
    """The date that ``text``, which is ``spelled``, is; None for what is none. 5/3/2020 is none: it has two readings."""
    plain = " ".join(text.replace('"', " ").split())
    plain = _WEEKDAY.sub("", plain, count=1)
    for pattern in _WRITTEN:
        if found := pattern.fullmatch(plain):
            parts = found.groupdict()
            named = parts.get("name")
            month = int(parts["month"]) if named is None else [each[:3] for each in _MONTHS].index(named[:3].lower()) + 1
            day = int(parts["day"])
            if not (1 <= month <= 12 and 1 <= day <= 31):
                return None
            return Day(int(parts["year"]) if parts["year"] else None, month, day)
    return None
