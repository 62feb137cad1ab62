"""The options of the environments that score programs."""

from __future__ import annotations

from datetime import date
from typing import Annotated

import msgspec

from gspo_services.tasks.environments.layouts import LayoutName
from gspo_services.tasks.environments.programs import TOOLCHAINS, ProgramRules, Toolchain
from gspo_services.tasks.environments.sources import OnBadRow, RowFilter, SourceOptions

PROGRAM_PROMPT = (
    "Solve the problem with a program that reads standard input and writes standard output. Think first if you like, and "
    "give the whole program in one block between ```python and ```."
)
FUNCTION_PROMPT = (
    "Solve the problem by completing the code below; keep the names that it has. Think first if you like, and give the "
    "whole code in one block between ```python and ```."
)


class CodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the problems, and how programs are scored."""

    train_path: str = ""
    """The training split: a file (.jsonl, .json, .csv, .parquet), a pattern such as data/train-*.parquet, or a folder; ~ and
    $NAME are filled in. "" when there is none."""
    eval_path: str = ""
    """The held-out split, likewise."""
    sources: tuple[SourceOptions, ...] = ()
    """In place of train_path: several, as {path, weight, name}. They are sampled in proportion to their weights."""
    layout: LayoutName = ""
    """How rows are laid out; "" recognises it by the columns."""
    generated_tests_path: str = ""
    """The folder of open-r1/codeforces' generated tests; "": generated_tests beside the file of the rows or its folder."""
    on_bad_row: OnBadRow = "error"
    """A row that cannot be used stops the run, or is counted and left out."""
    id_column: str = ""
    """The column that identifies a problem; "": its content does, wherever it lies. The same row again is the same task."""
    filter: RowFilter = RowFilter()
    """Training rows to leave out: {min_chars, max_chars, pass_rate_column, min_pass_rate, max_pass_rate}."""
    since: date | None = None
    """Leave out problems that were published before this day; a row without a date is bad then."""
    until: date | None = None
    """Leave out problems that were published on this day or later, likewise."""
    system_prompt: str = PROGRAM_PROMPT
    """The system message for programs; "" for none."""
    function_prompt: str = FUNCTION_PROMPT
    """The system message for problems that name a function."""
    unfenced: bool = False
    """An answer without a ``` fence is the program itself; otherwise it has none, which is worth 0."""
    languages: tuple[str, ...] = ("python",)
    """The languages that an answer may be in; the first one where the fence names none."""
    toolchains: dict[str, Toolchain] | None = None
    """How other languages are compiled and run, by name; or another compiler for "python" and "cpp"."""
    partial_credit: bool = False
    """The reward is the share of tests that are passed, and all are run. Otherwise it is 1 for all of them, or 0."""
    test_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """Processor seconds of one test, and a third of its seconds by the clock; a row's own limit and that of a public set's
    owners come first."""
    total_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """Of all tests of a program, likewise."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=16 << 20)] = 512 << 20
    """Memory of one test, likewise."""
    output_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 1 << 20
    """What a test may print; twice the expected output is always allowed."""
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1e-6
    """How far a number with a fraction or an exponent may be off, absolutely or relative to it, in rows of your own; public
    sets have their owners' rules."""
    try_solutions: bool = True
    """Try a row's own solution on its tests before the first program is scored by them: tests that it fails score nobody."""

    def all_toolchains(self) -> dict[str, Toolchain]:
        """Every language that is known."""
        return {**TOOLCHAINS, **(self.toolchains or {})}

    def rules(self, testlib: str) -> ProgramRules:
        """What the grader is told; ``testlib`` is the text of testlib.h."""
        return ProgramRules(
            test_s=self.test_s, total_s=self.total_s, memory_bytes=self.memory_bytes, output_bytes=self.output_bytes,
            tolerance=self.tolerance, all_tests=self.partial_credit, try_solution=self.try_solutions, testlib=testlib,
        )  # fmt: skip
