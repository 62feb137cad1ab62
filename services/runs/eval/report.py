"""The table of results on a terminal."""

from collections.abc import Callable, Sequence

from rich.table import Table

from gspo_services.runs.eval.results import SetResult, change
from gspo_services.shared.eval_metrics import Estimate, Interval


def results_table(results: Sequence[SetResult]) -> Table:
    """Tabulate one row for each set, metric and model; each further model is compared with the first."""
    several = len({each.model.label for each in results}) > 1
    note = "change: from the first model, over the same tasks" if several else None
    table = Table(title="Evaluation, 95 % intervals", caption=note)
    headings = ["set", "metric", "model", "value", "interval", *(["change"] if several else []), "tasks"]
    for heading in headings:
        is_text = heading in ("set", "metric", "model")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=heading != "model")
    for set_name in dict.fromkeys(each.set_name for each in results):
        of_set = [each for each in results if each.set_name == set_name]
        for place, estimate in enumerate(of_set[0].estimates):
            for result in of_set:
                first = result is of_set[0]
                found = result.estimates[place]
                moved = None if first else change(of_set[0], result, found.metric)
                words = [value_text(found), interval_text(found), *([change_text(moved)] if several else [])]
                name = [set_name if first and place == 0 else "", estimate.metric if first else ""]
                table.add_row(*name, result.model.label, *words, str(found.num_tasks))
        table.add_section()
    return table


def value_text(found: Estimate) -> str:
    """Format the value, or say why there is none."""
    if found.value is not None:
        return _number(found)(found.value)
    return {"all_solved": "all solved", "none_solved": "none solved", "no_samples": "too few samples", "": "-"}[found.remark]


def interval_text(found: Estimate) -> str:
    """Format the interval; an open end is named."""
    shown = _number(found)
    if found.low is None and found.high is None:
        return "-"
    if found.high is None and found.low is not None:
        return f"{shown(found.low)} or more"
    if found.low is None and found.high is not None:
        return f"{shown(found.high)} or less"
    assert found.low is not None
    assert found.high is not None
    return f"{shown(found.low)} to {shown(found.high)}"


def change_text(moved: Interval | None) -> str:
    """Format a difference with half of its interval."""
    if moved is None:
        return "-"
    if moved.low is None:
        return f"{moved.value:+.3f}"
    return f"{moved.value:+.3f} +- {moved.value - moved.low:.3f}"


def cost_lines(results: Sequence[SetResult]) -> list[str]:
    """Say what the samples have cost, and how many have no reward."""
    lines = []
    for each in results:
        speed = f", {each.num_action_tokens / each.engine_s:,.0f} tokens/s" if each.engine_s else ""
        cut = f", {each.cut_off:.1%} cut off by length" if each.cut_off else ""
        lines.append(
            f"{each.set_name}, {each.model.label}: {each.num_samples:,} samples, {each.num_action_tokens:,} sampled tokens, "
            f"{each.engine_s:,.1f} s of the engine{speed}{cut}"
        )
        if each.num_failed:
            lines.append(
                f"  {each.num_failed:,} more have no reward and count in no metric; the same command tries them again. "
                f"The first: {each.first_failure}"
            )
    return lines


def _number(found: Estimate) -> Callable[[float], str]:
    return _rating if found.metric == "elo" else _share


def _rating(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
