"""plot.png: one picture of a run, for a slide. Each panel answers one question that people ask about it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gspo_services.runs.metrics import RunMetrics, SetScores, column, known, mean, quantile, rolling, window
from gspo_services.runs.plot_style import BLUE, DPI, GREEN, GREY, ORANGE, PURPLE, RED, STYLE
from gspo_services.shared.runtime.plain_text import one_line

PLOT_FILE: Final = "plot.png"
SIZE: Final = (16.0, 9.0)
MOST_SETS: Final = 5
"""Curves of named evaluation sets in one panel."""
LAGS: Final = (
    ("lag_0", "lag 0", BLUE), ("lag_1", "lag up to 1", GREEN), ("lag_2", "lag 1 to 2", ORANGE),
    ("lag_3_4", "lag 2 to 4", RED), ("lag_5_up", "lag over 4", PURPLE),
)  # fmt: skip
DIFFICULTIES: Final = (("seldom", "tasks seldom solved before", ORANGE), ("often", "tasks often solved before", GREEN))
"""The difficulties whose pass rates are drawn beside the reward: the others are near 0 and 1 by definition."""
EVENTS: Final = (
    ("dropped", "groups dropped", "v", ORANGE), ("quarantined", "batch quarantined", "X", RED),
    ("again", "batch trained again", "o", PURPLE), ("requeued", "batches requeued", "^", GREEN),
)  # fmt: skip


def write_plot(recorded: RunMetrics) -> Path:
    """Write plot.png into the run's directory. Raises: ValueError when there is nothing to draw, OSError."""
    if not recorded.batches and not recorded.evaluations:
        raise ValueError(f"{recorded.path}: no batch and no evaluation recorded yet, nothing to draw")
    # matplotlib takes a second to import, so it is imported only when a plot is wanted.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path, begun = recorded.path.with_name(PLOT_FILE), recorded.path.with_name(f".{PLOT_FILE}")
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=SIZE, constrained_layout=True)
        try:
            _draw(figure, recorded)
            figure.savefig(begun, format="png", dpi=DPI)
            begun.replace(path)  # A full disk leaves the earlier picture whole.
        finally:
            begun.unlink(missing_ok=True)
            pyplot.close(figure)
    return path


def happened(recorded: RunMetrics) -> dict[str, list[int]]:
    """Return the batches at which something happened, by kind."""
    found: dict[str, list[int]] = {kind: [] for kind, *_ in EVENTS}
    for batch, row in recorded.events:
        kind = "again" if row["event"] == "batch" else row["event"]
        if kind in found:
            found[kind].append(batch)
    return found


def _draw(figure: Any, recorded: RunMetrics) -> None:
    events = happened(recorded)
    has_events = any(events.values())
    figure.get_layout_engine().set(w_pad=0.2, h_pad=0.14, wspace=0.03, hspace=0.03)
    figure.suptitle(_headline(recorded), x=0.012, ha="left", fontsize=18, fontweight="bold", color="#1F2937")
    rows = figure.add_gridspec(3 if has_events else 2, 6, height_ratios=[1, 1, 0.16] if has_events else [1, 1])
    panels: list[Callable[[Any, RunMetrics], None]] = [_reward, _length, _entropy, _clip, _lag, _speed]
    for place, draw in enumerate(panels):
        row, left = divmod(place, 3)
        axes = figure.add_subplot(rows[row, 2 * left : 2 * left + 2])
        draw(axes, recorded)
        axes.margins(x=0.02)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if not axes.has_data():
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
            axes.set(xticks=[], yticks=[])
        if row == 1:
            axes.set_xlabel("batch")
    if has_events:
        _events(figure.add_subplot(rows[2, :]), recorded, events)


def _index(recorded: RunMetrics) -> list[float]:
    return column(recorded.batches, "batch")


def _headline(recorded: RunMetrics) -> str:
    parts = [one_line(recorded.path.parent.resolve().name, 60), f"{len(recorded.batches):,} batches"]
    times = known(column(recorded.batches, "time_s"))
    if times:
        hours = times[-1] / 3600
        parts.append(
            f"{hours:.1f} h" if hours >= 1 else f"{times[-1] / 60:.0f} min" if times[-1] >= 120 else f"{times[-1]:.0f} s"
        )
    rewards = [each.reward for each in recorded.evaluations]
    if rewards:
        parts.append(f"held-out reward {rewards[0]:.3g} → {rewards[-1]:.3g}")
    return "   ·   ".join(parts)


def _reward(axes: Any, recorded: RunMetrics) -> None:
    axes.set_title("Reward")
    index, training = _index(recorded), column(recorded.batches, "reward_mean")
    if not known(training):
        training = column(recorded.batches, "train/reward")
    _faint_and_smooth(axes, index, training, BLUE, "training")
    shown = recorded.evaluations
    rewards = [each.reward for each in shown]
    errors = [0.0 if math.isnan(each.half_interval) else each.half_interval for each in shown]
    if rewards:
        # The point moves right by how much newer than the evaluated weights the tokens are on average.
        newer = [each.versions_newer if each.versions_newer >= 0.5 else 0.0 for each in shown]
        axes.errorbar(
            [each.batch for each in shown], rewards, yerr=errors, xerr=[[0.0] * len(newer), newer], color=RED, marker="o",
            markersize=6, elinewidth=1.6, capsize=3,
            label="held out, 95 % interval" if any(errors) else "held out",
        )  # fmt: skip
    values = _set_curves(axes, recorded.sets)
    for name, label, colour in DIFFICULTIES:
        passed = rolling(column(recorded.batches, f"pass_rate/{name}"), mean)
        if known(passed):
            _line(axes, _index(recorded), passed, colour, label, linewidth=1.4, linestyle=(0, (4, 2)))
    if all(0 <= value <= 1 for value in [*known(training), *rewards, *values]):
        axes.set_ylim(-0.03, 1.03)
    _legend(axes, "lower right")


def _set_curves(axes: Any, sets: list[SetScores]) -> list[float]:
    """Draw those metrics of named sets that are shares, with intervals. Returns the values; ratings have another scale."""
    found: dict[str, list[tuple[int, tuple[float, float, float]]]] = {}
    for scores in sets:
        for metric, values in scores.metrics.items():
            if metric not in ("elo", "reward") and not any(map(math.isnan, values)):
                found.setdefault(f"{scores.name} {metric}", []).append((scores.batch, values))
    for place, (name, points) in enumerate(list(found.items())[:MOST_SETS]):
        points.sort()
        shown = [values for _, values in points]
        axes.errorbar(
            [batch for batch, _ in points], [value for value, _, _ in shown],
            yerr=[[value - low for value, low, _ in shown], [high - value for value, _, high in shown]],
            color=(GREEN, ORANGE, PURPLE, GREY, BLUE)[place], marker="s", markersize=4, linewidth=1.4, elinewidth=1.0,
            capsize=2, label=one_line(name, 40),
        )  # fmt: skip
    return [value for points in found.values() for _, (value, _, _) in points]


def _length(axes: Any, recorded: RunMetrics) -> None:
    axes.set_title("Answer length (tokens)")
    index, batches = _index(recorded), recorded.batches
    means = column(batches, "length/mean")
    p95, longest = column(batches, "length/p95"), column(batches, "length/max")
    if known(p95):
        axes.fill_between(index, rolling(means, mean), rolling(p95, mean), color=BLUE, alpha=0.14, linewidth=0)
        axes.plot(index, rolling(p95, mean), color=BLUE, linewidth=1.4, alpha=0.7, label="95 % are shorter")
    if known(longest):
        axes.plot(index, rolling(longest, max), color=GREY, linewidth=1.2, linestyle=(0, (1, 1.5)), label="longest")
    _line(axes, index, rolling(means, mean), BLUE, "mean")
    limits = column(batches, "sampling/max_turn_tokens")
    if len(set(known(limits))) > 1:
        axes.step(index, limits, where="post", color=PURPLE, linewidth=1.4, label="limit of a turn")
    if axes.has_data():
        axes.set_ylim(bottom=0)
    cut = column(batches, "length/cut_off")
    if any(known(cut)):
        right = axes.twinx()
        right.grid(visible=False)
        right.fill_between(index, rolling([100 * value for value in cut], mean), color=RED, alpha=0.18, linewidth=0)
        axes.fill_between([], [], color=RED, alpha=0.18, label="cut off by a limit (%, right)")
        right.set_ylim(0, 100)
        right.spines["right"].set_visible(False)
        right.tick_params(axis="y", length=0)
    if axes.has_data() and (known(p95) or any(known(cut))):
        axes.set_ylim(top=1.3 * axes.get_ylim()[1])
    _legend(axes, "upper left", columns=2)


def _entropy(axes: Any, recorded: RunMetrics) -> None:
    axes.set_title("Entropy (nats per token)")
    _faint_and_smooth(axes, _index(recorded), column(recorded.batches, "entropy/all"), PURPLE, None)
    if axes.has_data():
        axes.set_ylim(bottom=0)


def _clip(axes: Any, recorded: RunMetrics) -> None:
    axes.set_title("Sequences clipped (%)")
    for bucket, label, colour in LAGS:
        values = [100 * value for value in column(recorded.batches, f"clip_fraction/{bucket}")]
        if known(values):
            # A lag that few batches have is drawn as dots: nothing was measured between them.
            dotted = len(known(values)) < len(values) / 2
            look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5} if dotted else {"linewidth": 1.8}
            _line(axes, _index(recorded), rolling(values, mean), colour, label, **look)
    every = [100 * value for value in column(recorded.batches, "clip_fraction/all")]
    if known(every):
        _line(axes, _index(recorded), rolling(every, mean), "#1F2937", "all", linewidth=2.8)
    if axes.has_data():
        axes.set_ylim(bottom=0)
        _clip_widths(axes, recorded)
    _legend(axes, "best", columns=2)


def _clip_widths(axes: Any, recorded: RunMetrics) -> None:
    """Draw how wide the clip range was for each lag, on its own scale: the range follows measurements."""
    widths = {colour: column(recorded.batches, f"clip_range_high/{bucket}") for bucket, _, colour in LAGS}
    if len({value for values in widths.values() for value in known(values) if value > 0}) < 2:
        return  # A fixed range needs no curve.
    right = axes.twinx()
    right.grid(visible=False)
    for colour, values in widths.items():
        right.plot(_index(recorded), rolling(values, mean), color=colour, linewidth=1.2, linestyle=(0, (2, 1.5)), alpha=0.8)
    right.set_yscale("log")
    right.spines["right"].set_visible(False)
    right.tick_params(axis="y", which="both", length=0, labelsize=10)
    axes.plot([], [], color=GREY, linewidth=1.2, linestyle=(0, (2, 1.5)), label="upper bound (nats, right)")


def _lag(axes: Any, recorded: RunMetrics) -> None:
    axes.set_title("Lag (policy versions)")
    index, means = _index(recorded), column(recorded.batches, "lag/all")
    if not known(means):
        means = column(recorded.batches, "lag/mean")
    if known(means):
        low, high = rolling(means, quantile(0.1)), rolling(means, quantile(0.9))
        if window(len(means)) > 1:
            axes.fill_between(index, low, high, color=BLUE, alpha=0.18, linewidth=0, label="middle 80 % of batches")
        _line(axes, index, rolling(means, mean), BLUE, "mean")
    largest = column(recorded.batches, "lag/max")
    if known(largest):
        axes.plot(index, rolling(largest, max), color=RED, linewidth=1.6, linestyle=(0, (4, 2)), label="largest")
    if axes.has_data():
        axes.set_ylim(0, max(1.0, *known([*means, *largest])) * 1.25)
    _legend(axes, "upper right", columns=3)


def _speed(axes: Any, recorded: RunMetrics) -> None:
    axes.set_title("Throughput (tokens/s)")
    values = column(recorded.batches, "tokens_per_s")
    _faint_and_smooth(axes, _index(recorded), values, GREEN, None, quantile(0.5))
    if axes.has_data():
        # A batch that was ready when requested takes almost no time: its peak would flatten all others.
        axes.set_ylim(0, 1.6 * max(known(rolling(values, quantile(0.5)))) or 1.0)


def _events(axes: Any, recorded: RunMetrics, events: dict[str, list[int]]) -> None:
    axes.set_title("Events", fontsize=12, pad=4)
    for place, (kind, label, marker, colour) in enumerate(each for each in EVENTS if events[each[0]]):
        found = events[kind]
        axes.scatter(
            found, [-place] * len(found), marker=marker, color=colour, s=60, label=f"{label} ({len(found)})", alpha=0.8
        )
    last = max([*known(_index(recorded)), *(at for found in events.values() for at in found), 1.0])
    axes.set(xlim=(-0.02 * last, 1.02 * last), yticks=[], xlabel="batch")
    axes.margins(y=0.5)
    axes.spines["left"].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(EVENTS), borderaxespad=0.1)


def _faint_and_smooth(
    axes: Any,
    index: list[float],
    values: list[float],
    colour: str,
    label: str | None,
    measure: Callable[[list[float]], float] = mean,
) -> None:
    """Draw every value faintly, and the trend on top."""
    if not known(values):
        return
    if window(len(values)) > 1:
        axes.plot(index, values, color=colour, alpha=0.28, linewidth=1.1)
    _line(axes, index, rolling(values, measure), colour, label)


def _line(axes: Any, index: list[float], values: list[float], colour: str, label: str | None, **options: Any) -> None:
    """Draw a curve; a single value becomes a dot."""
    look: dict[str, Any] = {"marker": "o"} if len(known(values)) == 1 else {}
    axes.plot(index, values, color=colour, label=label, **{**look, **options})


def _legend(axes: Any, place: str, columns: int = 1) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=place, ncols=columns, handlelength=1.6, columnspacing=1.2)
