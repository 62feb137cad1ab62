"""What a program may use while it is scored, and how its output is compared."""

from __future__ import annotations

from typing import Annotated

import msgspec


class ProgramRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rules of an environment; a problem's own limits come first."""

    test_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Processor seconds of one test; three times as long by the clock."""
    total_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Of all tests of a program, likewise."""
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] = 512 << 20
    output_bytes: Annotated[int, msgspec.Meta(gt=0)] = 1 << 20
    """Of one test's output; twice the expected output is always allowed."""
    processes: Annotated[int, msgspec.Meta(gt=0)] = 32
    tolerance: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    """Of numbers with a fraction or an exponent."""
    all_tests: bool = False
    """Run the tests behind one that failed, too."""
    try_solution: bool = False
    """Try the problem's own solution before the first program is scored."""
    testlib: str = ""
    """The text of testlib.h, for checkers that include it."""
