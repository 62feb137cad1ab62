"""plot.png of an evaluation: each metric in a panel, over batches or by model, with its intervals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gspo_services.runs.eval.results import SetResult
from gspo_services.runs.plot_style import DPI, STYLE, colour_of
from gspo_services.shared.runtime.plain_text import one_line

PLOT_FILE: Final = "plot.png"
_PANEL: Final = (5.6, 4.2)
_MOST_ACROSS: Final = 3


def write_picture(results: Sequence[SetResult], path: Path) -> None:
    """Write the picture, whole or not at all. Raises: OSError."""
    # matplotlib takes a second to import, so it is imported only when a picture is wanted.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metrics = list(dict.fromkeys(each.metric for result in results for each in result.estimates))
    across = min(_MOST_ACROSS, len(metrics))
    down = -(-len(metrics) // across)
    begun = path.with_name(f".{path.name}")
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(max(1.3, across) * _PANEL[0], down * _PANEL[1]), constrained_layout=True)
        try:
            for place, metric in enumerate(metrics):
                _panel(figure.add_subplot(down, across, place + 1), metric, results)
            figure.savefig(begun, format="png", dpi=DPI)
            begun.replace(path)
        finally:
            begun.unlink(missing_ok=True)
            pyplot.close(figure)


def _panel(axes: Any, metric: str, results: Sequence[SetResult]) -> None:
    axes.set_title(metric)
    labels = list(dict.fromkeys(each.model.label for each in results))
    over_batches = all(each.batch is not None for each in results)
    for place, set_name in enumerate(dict.fromkeys(each.set_name for each in results)):
        points = []
        for result in (each for each in results if each.set_name == set_name):
            x = result.batch if over_batches and result.batch is not None else labels.index(result.model.label)
            points += [(x, each) for each in result.estimates if each.metric == metric]
        _series(axes, points, one_line(set_name, 40), colour_of(place), joined=over_batches)
    if over_batches:
        axes.set_xlabel("batch")
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        axes.set_xticks(range(len(labels)), [one_line(label, 24) for label in labels])
    axes.margins(x=0.1)
    if metric != "elo" and axes.has_data():
        low, high = axes.get_ylim()
        if low >= -0.1 and high <= 1.1:
            axes.set_ylim(-0.03, 1.03)
    if axes.has_data():
        axes.legend(loc="best")
    else:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", va="center")


def _series(axes: Any, points: Sequence[tuple[int, Any]], label: str, colour: str, *, joined: bool) -> None:
    known = sorted((x, each) for x, each in points if each.value is not None)
    if known:
        # If an interval is open at one end, that half is not drawn.
        below = [0.0 if each.low is None else each.value - each.low for _, each in known]
        above = [0.0 if each.high is None else each.high - each.value for _, each in known]
        axes.errorbar(
            [x for x, _ in known], [each.value for _, each in known], yerr=[below, above], color=colour, marker="o",
            markersize=6, elinewidth=1.6, capsize=3, label=label, linestyle="-" if joined else "none",
        )  # fmt: skip
    for x, each in points:
        bound = each.low if each.value is None and each.low is not None else each.high if each.value is None else None
        if bound is not None:
            # Everything, or nothing, was solved: the rating is beyond this bound.
            axes.plot([x], [bound], color=colour, marker="^" if each.high is None else "v", markersize=8, linestyle="none")
