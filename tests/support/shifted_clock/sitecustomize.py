"""Another hour for a process that has this folder on its PYTHONPATH: GSPO_TEST_CLOCK_S seconds from now.

Only what Python says of the wall clock moves. Monotonic clocks, and the times of files, stay the machine's.
"""

import datetime
import os
import time
from typing import Any

_SHIFT_S = float(os.environ.get("GSPO_TEST_CLOCK_S", "0"))
_time, _time_ns, _gettime = time.time, time.time_ns, time.clock_gettime  # noqa: TID251
_DateTime = datetime.datetime


def _shifted_time() -> float:
    return _time() + _SHIFT_S


class _Meta(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _DateTime)


class _ShiftedDateTime(datetime.datetime, metaclass=_Meta):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return _DateTime.fromtimestamp(_shifted_time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return _DateTime.fromtimestamp(_shifted_time(), datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return _DateTime.fromtimestamp(_shifted_time())


def _with_default(function: Any) -> Any:
    return lambda seconds=None: function(_shifted_time() if seconds is None else seconds)


if _SHIFT_S:
    _strftime = time.strftime
    time.gmtime, time.localtime, time.ctime = (_with_default(each) for each in (time.gmtime, time.localtime, time.ctime))
    time.strftime = lambda text, at=None: _strftime(text, time.localtime() if at is None else at)
    time.time = _shifted_time  # noqa: TID251
    time.time_ns = lambda: _time_ns() + int(_SHIFT_S * 1e9)
    time.clock_gettime = lambda which: _gettime(which) + (_SHIFT_S if which == time.CLOCK_REALTIME else 0)
    datetime.datetime = _ShiftedDateTime  # type: ignore[misc]
