"""Write tables into docs/evidence/study.md and plots into docs/evidence/images/study, from the condensed results alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.study.reporting import settled, tables
from benchmarks.study.reporting.paper import paper
from benchmarks.study.reporting.plots import draw_all
from benchmarks.study.results import Results, load_probes, load_summaries

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "evidence" / "study.md"
GSPO = "GSPO 3e-4/4e-4"
IMAGES = ROOT / "docs" / "evidence" / "images" / "study"

_PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_report() -> None:
    """Draw the plots and put every table in its place. Raises: ValueError for a place without a table."""
    results, probes = Results(load_summaries()), load_probes()
    made: dict[str, Callable[[], str]] = {
        "objectives": lambda: tables.objectives(results, "a", "2e-4", GSPO),
        "collapse": lambda: tables.objectives(results, "a-collapse", "1e-3", GSPO),
        "collapse-middle": lambda: tables.objectives(results, "a-collapse", "5e-4", GSPO),
        "volatility": lambda: tables.volatility(probes),
        "mismatch": lambda: tables.mismatch(results),
        "precision": lambda: tables.precision(results),
        "precision-clip": lambda: tables.precision_clip(results),
        "staleness-short": lambda: tables.staleness(results, "d-short"),
        "staleness-long": lambda: tables.staleness(results, "d-long"),
        "staleness-scaled": lambda: tables.staleness(results, "d-scaled"),
        "staleness-scaled-clip": lambda: tables.staleness_more(results, "d-scaled", "clip"),
        "staleness-more": lambda: tables.staleness(results, "d-more"),
        "staleness-wider": lambda: tables.staleness(results, "d-wider"),
        "staleness-wider-clip": lambda: tables.staleness_more(results, "d-wider", "clip"),
        "staleness-oldest-clip": lambda: tables.staleness_more(results, "d-oldest", "clip"),
        "staleness-long-batches": lambda: tables.staleness_more(results, "d-long", "batches"),
        "staleness-oldest": lambda: tables.staleness(results, "d-oldest"),
        "staleness-batches": lambda: tables.staleness_more(results, "d-short", "batches"),
        "staleness-final": lambda: tables.staleness_more(results, "d-short", "final"),
        "staleness-clip": lambda: tables.staleness_more(results, "d-short", "clip"),
        "staleness-clip-long": lambda: tables.staleness_more(results, "d-long", "clip"),
        "eps": lambda: tables.wider_eps(results),
        "proximal": lambda: tables.proximal_pair(results, {"d-short": "short", "d-long": "long"}),
        "groups": lambda: tables.groups(results),
        "settled-tuning": lambda: settled.tuning(results),
        "settled": lambda: settled.comparison(results),
        "settled-by-lag": lambda: settled.by_lag(results),
        "paper": lambda: paper(results),
    }
    drawn = draw_all(results, probes, IMAGES)
    if DOCUMENT.is_file():
        DOCUMENT.write_text(fill(DOCUMENT.read_text(), made))
    else:
        for name, table in made.items():
            print(f"\n{name}\n\n{table()}")
    print(f"{len(drawn)} plots in {IMAGES}")


def fill(text: str, made: dict[str, Callable[[], str]]) -> str:
    """Return ``text`` with the parts between "<!-- table: name -->" and "<!-- end -->" replaced."""

    def place(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in made:
            raise ValueError(f'there is no table "{name}": use one of {", ".join(made)}')
        return f"{match[1]}\n{made[name]()}\n\n{match[3]}"

    return _PLACE.sub(place, text)
