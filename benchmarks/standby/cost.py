"""What a database in front of the ledger costs: chunks a second and the latency of an acknowledgement, with and without one.

    python -m benchmarks.standby.cost --rounds 5 --json cost.json

The same broker takes the same chunks from the same producers, in turns: with its ledger alone, and with three PostgreSQL
servers on this machine (a primary and two standbys, of which one must have each commit). So all disks are one disk here, and
all servers share its cores. Ratios are taken within a round; figures are medians over the rounds, with least and most.
"""

import argparse
import asyncio
import itertools
import json
import platform
import statistics
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.broker_intake.__main__ import intake
from benchmarks.markdown import table as markdown
from tests.support.postgres.trio import trio

KINDS: Final = ("ledger alone", "with the database")
LATENCY_CHUNKS: Final = 200


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One kind in one round."""

    per_s: float
    """Chunks that were acknowledged."""
    under_load_s: float
    """Median latency of an acknowledgement at that rate..."""
    alone_s: float
    """...and with one chunk under way for each producer."""
    chunks_per_commit: float


async def measure(directory: Path, *, rounds: int, chunks: int, chunk_tokens: int, producers: int) -> list[dict[str, Cost]]:
    """A broker of each kind in turns, each with a directory and a schema of its own."""
    found: list[dict[str, Cost]] = []
    numbers = itertools.count()
    with trio() as nodes:
        for _ in range(rounds):
            costs: dict[str, Cost] = {}
            for kind in KINDS:
                number = next(numbers)
                database = {"database": nodes.conninfo, "database_schema": f"run{number}"}
                settings = {} if kind == KINDS[0] else database
                place = directory / f"run-{number}"
                async with intake(place, chunk_tokens, producers, None, broker_settings=settings) as broker:
                    await broker.take(chunks // 4)
                    rate = await broker.take(chunks)
                    alone = await broker.take(LATENCY_CHUNKS, under_way=1)
                    costs[kind] = Cost(
                        per_s=rate.per_s,
                        under_load_s=statistics.median(rate.latencies_s),
                        alone_s=statistics.median(alone.latencies_s),
                        chunks_per_commit=rate.chunks / max(1.0, rate.commits),
                    )
                    await broker.end()
            found.append(costs)
    return found


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def table(found: list[dict[str, Cost]]) -> str:
    """What is printed."""
    lines = []
    for kind in KINDS:
        of_kind = [costs[kind] for costs in found]
        cells = [
            _spread([each.per_s for each in of_kind], 0),
            _spread([1000 * each.under_load_s for each in of_kind], 1),
            _spread([1000 * each.alone_s for each in of_kind], 1),
            _spread([each.chunks_per_commit for each in of_kind], 0),
        ]
        lines.append([kind, *cells])
    pairs = [(costs[KINDS[1]], costs[KINDS[0]]) for costs in found]
    ratios = [
        _spread([late.per_s / first.per_s for late, first in pairs], 2),
        _spread([late.under_load_s / first.under_load_s for late, first in pairs], 2),
        _spread([late.alone_s / first.alone_s for late, first in pairs], 2),
    ]
    return markdown(["", "chunks/s", "ms under load", "ms alone", "chunks a commit"], [*lines, ["ratio", *ratios, ""]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=6000, help="chunks in each measurement")
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--producers", type=int, default=2, help="producer processes")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(
            measure(
                Path(directory),
                rounds=arguments.rounds,
                chunks=arguments.chunks,
                chunk_tokens=arguments.chunk_tokens,
                producers=arguments.producers,
            )
        )
    print(table(found))
    if arguments.json:
        about = {"machine": platform.platform(), "at": datetime.now(tz=UTC).isoformat()}
        plain = [{kind: asdict(cost) for kind, cost in costs.items()} for costs in found]
        arguments.json.write_text(json.dumps({**about, "rounds": plain}, indent=2) + "\n")


if __name__ == "__main__":
    main()
