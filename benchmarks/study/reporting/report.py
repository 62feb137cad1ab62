"""Write every table into the folder of results, those of docs/evidence/study.md there too, and its plots; without runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study import real_model
from benchmarks.study.reporting import claims, default, lag, margin, settled, tables
from benchmarks.study.reporting.paper import engine, paper
from benchmarks.study.reporting.plots import draw_all
from benchmarks.study.results import RESULTS, Results, load_probes, load_summaries

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "evidence" / "study.md"
README = ROOT / "README.md"
GSPO = "GSPO 3e-4/4e-4"
IMAGES = ROOT / "docs" / "evidence" / "images" / "study"
ALL_TABLES = RESULTS / "tables.md"

_HEAD = """# All tables of the study

Written by `python -m benchmarks.study --plots`. docs/evidence/study.md explains the questions, the columns and the answers.
"""
_PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_report() -> None:
    """Draw the plots, write all tables, and fill those of the page. Raises: ValueError for a place without a table."""
    results, probes = Results(load_summaries()), load_probes()
    made = tables_of(results, probes)
    float32 = real_model.kept(real_model.RESULTS_FILE)
    masters = real_model.kept(real_model.BFLOAT16_FILE)
    drawn = draw_all(results, probes, IMAGES, float32, real_model.beside_float32(masters, float32) if masters else ())
    ALL_TABLES.write_text(one_below_the_other(made))
    for page in (DOCUMENT, README):
        page.write_text(fill(page.read_text(), made))
    print(f"{len(made)} tables in {ALL_TABLES}, {len(drawn)} plots in {IMAGES}")


def tables_of(results: Results, probes: Sequence[dict[str, Any]]) -> dict[str, Callable[[], str]]:
    """Return what makes each table, by its name in the page."""
    return {
        "claims": lambda: claims.table(results),
        "claims-in-short": lambda: claims.short_table(results),
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
        "staleness-oldest": lambda: tables.staleness(results, "d-oldest"),
        "staleness-batches": lambda: tables.staleness_more(results, "d-short", "batches"),
        "staleness-clip": lambda: tables.staleness_more(results, "d-short", "clip"),
        "staleness-clip-long": lambda: tables.staleness_more(results, "d-long", "clip"),
        "eps": lambda: tables.wider_eps(results),
        "proximal": lambda: tables.proximal_pair(results, {"d-short": "short", "d-long": "long"}),
        "groups": lambda: tables.groups(results),
        "settled-tuning": lambda: settled.tuning(results),
        "settled": lambda: settled.comparison(results),
        "settled-by-lag": lambda: settled.by_lag(results),
        "paper": lambda: paper(results),
        "engine": lambda: engine(results),
        "default": lambda: default.comparison(results),
        "margin": lambda: margin.comparison(results),
        "margin-eps": lambda: margin.widths(results),
        "lag": lambda: lag.comparison(results),
        "real-model": lambda: real_model.table(real_model.kept(real_model.RESULTS_FILE)),
        "real-model-gpu": lambda: real_model.table(real_model.kept(real_model.GPU_FILE)),
        "masters": lambda: real_model.masters_table(
            *map(real_model.kept, (real_model.BFLOAT16_FILE, real_model.RESULTS_FILE))
        ),
    }


def one_below_the_other(made: dict[str, Callable[[], str]]) -> str:
    """Return the file of all tables."""
    return "\n".join([_HEAD, *(f"## {name}\n\n{table()}\n" for name, table in made.items())])


def fill(text: str, made: dict[str, Callable[[], str]]) -> str:
    """Return ``text`` with the parts between "<!-- table: name -->" and "<!-- end -->" replaced."""

    def place(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in made:
            raise ValueError(f'there is no table "{name}": use one of {", ".join(made)}')
        return f"{match[1]}\n{made[name]()}\n\n{match[3]}"

    return _PLACE.sub(place, text)
