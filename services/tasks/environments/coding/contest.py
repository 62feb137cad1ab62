"""The environment ``contest``: problems with ratings, and checkers where several answers are right."""

from __future__ import annotations

from gspo_services.shared.runtime.paths import expanded
from gspo_services.tasks.environments.coding.environment import ProgramEnvironment, in_window
from gspo_services.tasks.environments.coding.options import CodeOptions
from gspo_services.tasks.environments.layouts import ProgramRow

CONTEST_PROMPT = (
    "Solve the problem with a program that reads standard input and writes standard output, in Python or C++20. Think first "
    "if you like, and give the whole program in one block between ```python or ```cpp and ```."
)


class ContestOptions(CodeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Those of ``code``, and which problems are meant."""

    system_prompt: str = CONTEST_PROMPT
    """The system message; "" for none."""
    languages: tuple[str, ...] = ("python", "cpp")
    """The languages that an answer may be in; the first one where the fence names none."""
    min_rating: int | None = None
    """Leave out problems that are easier; a row without a rating is bad then."""
    max_rating: int | None = None
    """Leave out problems that are harder, likewise."""
    testlib_path: str = ""
    """The file testlib.h, for checkers that include it."""


class Contest(ProgramEnvironment):
    """One problem, one program, judged by its checker where it has one; its rating goes with the task."""

    options_type = ContestOptions
    name = "contest"
    kept_by = "since, until, min_rating, max_rating and the filter"

    def __init__(self, options: ContestOptions) -> None:
        """Raises: ValueError for a language that is not known, and for a testlib_path that cannot be read."""
        self._contest = options
        super().__init__(options)

    def testlib(self) -> str:
        """See ``ProgramEnvironment.testlib``."""
        path = self._contest.testlib_path
        try:
            return expanded(path).read_text(encoding="utf-8", errors="replace") if path else ""
        except OSError as error:
            raise ValueError(f"testlib_path is {path}, which cannot be read: {error}") from error

    def keeps(self, row: ProgramRow) -> bool:
        """See ``ProgramEnvironment.keeps``."""
        options = self._contest
        known = options.all_toolchains()
        if row.checker is not None and row.checker.language not in known:
            raise ValueError(
                f'its checker is in "{row.checker.language}": expected one of {", ".join(sorted(known))}, or say how it '
                "runs in toolchains"
            )
        if options.min_rating is None and options.max_rating is None:
            return in_window(row, options)
        if row.rating is None:
            raise ValueError("it has no rating, and min_rating or max_rating ask for one")
        low, high = options.min_rating, options.max_rating
        return (low is None or row.rating >= low) and (high is None or row.rating <= high) and in_window(row, options)
