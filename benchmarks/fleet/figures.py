"""The figures by number of rollouts: a table, what grows faster than linearly, and the plots."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOUR: Final = "#0072B2"
REFERENCE: Final = "#D55E00"
TOLERANCE: Final = 0.15
"""What is above linear by less than this exponent may be noise."""
COLUMNS: Final = 3
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FleetFigure:
    """One figure. ``may_grow``: the exponent of N with which it grows where the whole grows linearly."""

    title: str
    unit: str
    value: Callable[[Result], float]
    may_grow: float = 1.0


FIGURES: Final = (
    FleetFigure(title="chunks taken", unit="1/s", value=lambda r: r["steady"]["chunks_per_s"]),
    FleetFigure(title="broker's CPU per chunk", unit="us", value=lambda r: r["steady"]["cpu_us_per_chunk"], may_grow=0.0),
    FleetFigure(title="acknowledgement, p50", unit="ms", value=lambda r: r["steady"]["ack_p50_ms"]),
    FleetFigure(title="acknowledgement, p99", unit="ms", value=lambda r: r["steady"]["ack_p99_ms"]),
    FleetFigure(title="lease, p50", unit="ms", value=lambda r: r["steady"]["lease_p50_ms"]),
    FleetFigure(title="lease, p99", unit="ms", value=lambda r: r["steady"]["lease_p99_ms"]),
    FleetFigure(
        title="CPU per chunk, joins and losses", unit="us", value=lambda r: r["changing"]["cpu_us_per_chunk"], may_grow=0.0
    ),
    FleetFigure(title="broker's memory", unit="MiB", value=lambda r: r["changing"]["rss_mib"]),
    FleetFigure(title="broker's threads", unit="", value=lambda r: r["changing"]["threads"], may_grow=0.0),
    FleetFigure(title="broker's open files", unit="", value=lambda r: r["changing"]["files"]),
    FleetFigure(title="broker starts again", unit="s", value=lambda r: r["recovery"]["broker_starts_s"]),
    FleetFigure(title="all work after kill -9", unit="s", value=lambda r: r["recovery"]["recovered_all_s"]),
    FleetFigure(title="broker's CPU, recovery", unit="s", value=lambda r: r["recovery"]["recovery_cpu_s"]),
    FleetFigure(title="ledger", unit="MiB", value=lambda r: r["proof"]["ledger_mib"]),
)


def exponent(smaller: tuple[float, float], larger: tuple[float, float]) -> float:
    """The power of N with which a figure grows between two (N, value); 0 where one of the values is not positive."""
    (few, low), (many, high) = smaller, larger
    return math.log(high / low) / math.log(many / few) if low > 0 and high > 0 and many > few else 0.0


def growth(results: Sequence[Result]) -> dict[str, float]:
    """By figure: its exponent between the two largest fleets, where what is fixed weighs least; empty for a single fleet."""
    if len(results) < 2:
        return {}
    a, b = results[-2:]
    return {figure.title: exponent((a["rollouts"], figure.value(a)), (b["rollouts"], figure.value(b))) for figure in FIGURES}


def too_fast(results: Sequence[Result]) -> list[str]:
    """What grows faster than it may where the whole grows linearly, in words."""
    exponents = growth(results)
    return [
        f"{figure.title} grows with N^{exponents[figure.title]:.2f}, and N^{figure.may_grow:g} is linear"
        for figure in FIGURES
        if exponents.get(figure.title, 0.0) > figure.may_grow + TOLERANCE
    ]


def table(results: Sequence[Result]) -> list[str]:
    """Markdown: a row for each figure, a column for each number of rollouts."""
    exponents = growth(results)
    lines = [
        "| | " + " | ".join(f"{result['rollouts']:,}" for result in results) + " | exponent |",
        "|---|" + "---|" * (len(results) + 1),
    ]
    for figure in FIGURES:
        name = f"{figure.title}, {figure.unit}" if figure.unit else figure.title
        cells = [_shown(figure.value(result)) for result in results]
        power = f"{exponents[figure.title]:.2f}" if exponents else ""
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {power} |")
    return lines


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot each figure over N, with the line of linear growth through its first point."""
    rows = -(-len(FIGURES) // COLUMNS)
    picture, axes = plt.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 2.6 * rows), squeeze=False)
    sizes = [result["rollouts"] for result in results]
    for place, cell in enumerate(axes.flat):
        if place >= len(FIGURES):
            cell.axis("off")
            continue
        figure = FIGURES[place]
        values = [figure.value(result) for result in results]
        cell.plot(sizes, values, "o-", color=COLOUR)
        if values[0] > 0:
            linear = [values[0] * (size / sizes[0]) ** figure.may_grow for size in sizes]
            cell.plot(sizes, linear, ":", color=REFERENCE, label="linear")
            cell.set_yscale("log")
        cell.set_xscale("log")
        cell.set_title(f"{figure.title}, {figure.unit}" if figure.unit else figure.title, fontsize=9)
    axes[0][0].legend(fontsize=8)
    picture.supxlabel("rollouts")
    picture.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=80)
    plt.close(picture)
