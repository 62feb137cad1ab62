"""The common style of a run's pictures: one set of colours and fonts."""

from typing import Any, Final

DPI: Final = 200
"""Twice that of a screen of 1,600 points."""
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8E5AA8", "#6B7280"
STYLE: Final[dict[str, Any]] = {
    "font.size": 12, "axes.titlesize": 15, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 12,
    "axes.labelsize": 12, "axes.labelcolor": GREY, "axes.edgecolor": "#C7CBD1", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#E9EBEE", "grid.linewidth": 1.0, "axes.axisbelow": True,
    "xtick.color": GREY, "ytick.color": GREY, "lines.linewidth": 2.4, "lines.solid_capstyle": "round",
    "legend.frameon": False, "legend.fontsize": 11, "figure.facecolor": "white",
}  # fmt: skip


def colour_of(place: int) -> str:
    """Return the colour of the curve at ``place``; after the sixth they start again."""
    return (BLUE, ORANGE, GREEN, RED, PURPLE, GREY)[place % 6]
