"""A run as a picture: the activities of SGLang and the learner, from logs, records and samples of the processes."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.pipeline.measures import CpuSample

Kind = Literal["generation", "weights", "training", "publication", "waiting"]
COLOURS: Final[dict[Kind, str]] = {
    "generation": "#4c78a8",
    "weights": "#e45756",
    "training": "#54a24b",
    "publication": "#b279a2",
    "waiting": "#e8e8e8",
}
MEANINGS: Final[dict[Kind, str]] = {
    "generation": "generates",
    "weights": "paused: loads and verifies weights",
    "training": "trains",
    "publication": "publishes",
    "waiting": "waits",
}
SHORTEST_WAIT_S: Final = 0.35
"""A working process sleeps for a moment now and then: anything shorter than this is no waiting."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One process's activity from ``begin`` to ``end``, in wall-clock seconds."""

    kind: Kind
    begin: float
    end: float
    label: str = ""


def wall_time(event: Mapping[str, Any]) -> float:
    """Return the time at which a log's event was written."""
    return datetime.fromisoformat(str(event["timestamp"])).timestamp()


def learner_spans(trained: Iterable[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Return spans of training, publication and the time between, by batch.

    ``trained``: the log's events, each written when its batch was trained and published. ``rows``: lines of the record, with
    the seconds that both took.
    """
    ends = {int(event["batch"]): wall_time(event) for event in trained}
    spans: list[Span] = []
    for row in rows:
        batch = int(row["batch"])
        if batch not in ends:
            continue
        published = ends[batch]
        stepped = published - float(row["publish_s"])
        begin = stepped - float(row["train_s"])
        if spans and begin > spans[-1].end:
            spans.append(Span(kind="waiting", begin=spans[-1].end, end=begin))
        spans.append(Span(kind="training", begin=begin, end=stepped, label=str(batch)))
        spans.append(Span(kind="publication", begin=stepped, end=published))
    return spans


def rollout_spans(samples: Sequence[CpuSample], loaded: Iterable[Mapping[str, Any]], role: str) -> list[Span]:
    """Return generation while ``role`` runs or waits for a core, overlaid by the pauses of the log's ``loaded`` events."""
    spans: list[Span] = []
    for before, after in pairwise(samples):
        kind: Kind = "generation" if role in after.running else "waiting"
        if spans and spans[-1].kind == kind:
            spans[-1] = dataclasses.replace(spans[-1], end=after.time)
        elif len(spans) > 1 and spans[-1].end - spans[-1].begin < SHORTEST_WAIT_S and spans[-1].kind == "waiting":
            spans.pop()
            spans[-1] = dataclasses.replace(spans[-1], end=after.time)
        else:
            spans.append(Span(kind=kind, begin=before.time, end=after.time))
    for event in loaded:
        end = wall_time(event)
        label = f"v{event['policy_version']}"
        spans.append(Span(kind="weights", begin=end - float(event["pause_s"]), end=end, label=label))
    return spans


def share(spans: Iterable[Span], kind: Kind, begin: float, end: float) -> float:
    """Return the share of the time between two moments that spans of one kind cover; they must not overlap."""
    covered = sum(max(0.0, min(span.end, end) - max(span.begin, begin)) for span in spans if span.kind == kind)
    return covered / (end - begin)


def draw(
    lanes: Mapping[str, Mapping[str, Sequence[Span]]], begins: Mapping[str, float], length_s: float, path: Path
) -> None:
    """Plot one panel per run, stacked on one scale: ``lanes[run][process]``, from ``begins[run]`` on."""
    # matplotlib takes a second to import, so only for a picture.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, panels = pyplot.subplots(len(lanes), 1, figsize=(11, 1.9 * len(lanes) + 0.8), sharex=True, squeeze=False)
    for axes, (run, processes) in zip(panels[:, 0], lanes.items(), strict=True):
        begin = begins[run]
        for height, spans in enumerate(reversed(list(processes.values()))):
            for span in spans:
                left, right = max(0.0, span.begin - begin), min(length_s, span.end - begin)
                if right <= left:
                    continue
                axes.barh(height, right - left, left=left, height=0.7, color=COLOURS[span.kind], linewidth=0)
                if span.kind == "training" and right - left > length_s / 40:
                    axes.text((left + right) / 2, height, span.label, ha="center", va="center", fontsize=8, color="white")
        axes.set_yticks(range(len(processes)), list(reversed(list(processes))))
        axes.set_xlim(0, length_s)
        axes.set_title(run, fontsize=10, loc="left")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[-1, 0].set_xlabel("seconds; numbers are batches")
    patches = [Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in COLOURS]
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
