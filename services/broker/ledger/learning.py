"""Stops a run that has nothing to learn from, and says how often its tasks came."""

from collections.abc import Mapping
from typing import Any

from gspo_protocol.messages.base import shortened
from gspo_services.broker.ledger.actions import Action
from gspo_services.broker.ledger.state import State
from gspo_services.shared.learning import is_silent, silence


def count_signal(state: State, line: Mapping[str, Any]) -> list[Action]:
    """Count a batch that was trained for the first time, by its line of metrics.jsonl."""
    if not is_silent(line):
        return state.change_run(batches_without_signal=0, had_signal=True)
    number, most = state.run.batches_without_signal + 1, state.config.stop_without_signal_batches
    counted = state.change_run(batches_without_signal=number)
    is_last = line["batch"] + 1 >= state.config.num_batches
    if not most or number < most or is_last or state.stop_reason:
        return counted
    found = silence([line], had_signal=state.run.had_signal)
    reason = shortened(
        f"no answer of the last {number} batches had an advantage (run.stop_without_signal_batches = {most}); in batch "
        f"{line['batch']}, {found.text}. {found.advice}. The same command continues the run"
    )
    failed = [] if found.is_solved else state.change_run(error=reason)
    return [*counted, *failed, *state.stop(reason)]


def data_measures(state: State) -> dict[str, float]:
    """How many training tasks there are, and how often each was drawn on average; nothing of tasks without end."""
    number = state.schedule.num_tasks
    if number is None:
        return {}
    return {"num_tasks": number, "data_passes": state.next_draw / number}
