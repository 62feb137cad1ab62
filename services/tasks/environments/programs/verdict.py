"""How a program did: which part of a reward it earns, and what ended it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from gspo_services.tasks.sandbox import LimitName

Ending = Literal[
    "solved", "no_program", "not_compiled", "wrong_answer", "checker_failed", "crashed",
    "limit_wall", "limit_cpu", "limit_memory", "limit_output", "limit_file", "limit_total",
]  # fmt: skip
"""What became of it: all tests passed; no program in the answer; what the first test that was not passed ended with.
checker_failed: the problem's checker takes the expected output, and crashed or said nothing on this one.
limit_total: all its tests together took too long."""

LIMIT_ENDINGS: Final[dict[LimitName, Ending]] = {
    "wall": "limit_wall", "cpu": "limit_cpu", "memory": "limit_memory", "output": "limit_output", "file": "limit_file",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProgramVerdict:
    """The result of one program."""

    ending: Ending
    num_passed: int = 0
    num_tests: int = 1
    detail: str = ""
    """For logs: which test, and what was said."""

    def components(self) -> dict[str, float]:
        """The parts of the reward: ``tests_passed``, a share, and for each ending 1 or 0."""
        share = self.num_passed / self.num_tests
        return {"tests_passed": share, **{name: float(name == self.ending) for name in get_args(Ending)}}
