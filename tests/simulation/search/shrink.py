"""Shortens a failing plan: leaves out events that it does not need, and uses as few batches as possible."""

from collections.abc import Callable
from dataclasses import replace

from tests.simulation.plan import Plan
from tests.simulation.world import Outcome, simulate

MAX_RUNS = 200


def shrink(failing: Outcome, run: Callable[[Plan], Outcome] = simulate, max_runs: int = MAX_RUNS) -> Outcome:
    """The shortest run that was found to break the same promise."""
    assert failing.violation is not None
    best = failing
    left = max_runs

    def try_(plan: Plan) -> bool:
        nonlocal best, left
        if left <= 0:
            return False
        left -= 1
        outcome = run(plan)
        same = outcome.violation is not None and outcome.violation.invariant == failing.violation.invariant  # type: ignore[union-attr]
        if same:
            best = outcome
        return same

    size = max(1, len(best.plan.events) // 2)
    while best.plan.events:
        events = best.plan.events
        shorter = any(
            try_(replace(best.plan, events=events[:at] + events[at + size :])) for at in range(0, len(events), size)
        )
        if not shorter and size == 1:
            break
        size = min(size, len(best.plan.events)) if shorter else size // 2
    for num_batches in range(1, best.plan.num_batches):
        if try_(replace(best.plan, num_batches=num_batches)):
            break
    return best
