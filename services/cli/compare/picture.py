"""The picture of a comparison: held-out and training reward over batches, tokens and seconds."""

from pathlib import Path
from typing import Any, Final

from gspo_services.runs.compare import AXES, Comparison, Curve, SeedGroup
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.plain_text import one_line

_LABELS: Final = {"batches": "batches", "tokens": "tokens trained on", "seconds": "seconds"}
_TITLES: Final = {"held_out": "Held-out reward", "training": "Training reward (running mean)"}
_SETTINGS_NAMED: Final = 2


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture to ``path`` as PNG, whole or not at all. Raises: ConfigurationError when there is nothing to draw;
    OSError."""
    # matplotlib takes a second to import, so it is imported only when a picture is wanted.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(_TITLES), len(AXES), figsize=(15, 8), sharey="row", constrained_layout=True)
    begun = path.with_name(f".partial-{path.name}")
    try:
        drawn = False
        for row, (measure, title) in zip(axes, _TITLES.items(), strict=True):
            for place, axis in enumerate(AXES):
                for colour, group in enumerate(comparison.groups):
                    curve = comparison.curve(group, measure, axis)
                    drawn |= _draw_curve(row[place], curve, f"C{colour % 10}", _label(comparison, group))
                row[place].set(xlabel=_LABELS[axis], title=title if place == 0 else "")
                row[place].grid(alpha=0.25)
        if not drawn:
            raise ConfigurationError("no run has a reward yet: there is nothing to draw")
        axes[0][0].legend(fontsize="small")
        figure.savefig(begun, format="png", dpi=110)
        begun.replace(path)  # A full disk leaves the former picture whole.
    finally:
        begun.unlink(missing_ok=True)
        pyplot.close(figure)


def _draw_curve(axes: Any, curve: Curve, colour: str, label: str) -> bool:
    """Return whether there was anything to draw."""
    several = len(curve.runs) > 1
    for x, y in curve.runs:
        axes.plot(x, y, color=colour, alpha=0.25 if several else 1.0, linewidth=0.8 if several else 1.5)
    if several and len(curve.x):
        axes.plot(curve.x, curve.mean, color=colour, linewidth=2)
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    if curve.runs:
        axes.plot([], [], color=colour, label=label)
    return bool(curve.runs)


def _label(comparison: Comparison, group: SeedGroup) -> str:
    """Return the group's letter, its first run, and the first settings that only it has."""
    place = comparison.groups.index(group)
    own = {key: values[place] for (_, key), values in comparison.differences.items() if key != "num_batches"}
    told = [f"{key}={value}" for key, value in own.items()][:_SETTINGS_NAMED]
    seeds = [f"{len(group.runs)} seeds"] if len(group.runs) > 1 else []
    text = ", ".join([f"{group.name}: {group.runs[0].directory.name}", *seeds, *told])
    # matplotlib takes text between dollar signs for mathematics.
    return one_line(text, 80).replace("$", r"\$")
