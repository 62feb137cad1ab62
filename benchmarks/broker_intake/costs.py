"""What one chunk costs a broker, and where: CPU microseconds, by stage.

    python -m benchmarks.broker_intake.costs --chunk-tokens 64

Real producers send over real sockets to a real broker with real SQLite. Each stage is timed with the clock of its thread's
CPU, so other work on the machine and waiting for the disk do not count; reading the clock costs some 0.3 us a call. "the
rest" is what else the process did: the event loop, ZeroMQ's own threads, metrics, replies.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.broker_intake.__main__ import intake
from benchmarks.broker_intake.staged_broker import STAGES, STAGES_FILE
from gspo_services.shared.runtime.logs import configure_logging

KIND_HELP: Final = "alone: one chunk a message; ready: messages made beforehand, of one chunk of each trajectory"


async def cost(directory: Path, chunk_tokens: int, num_chunks: int, num_producers: int, kind: str) -> dict[str, float]:
    """Microseconds a chunk of each stage, of the rest, and of all."""
    module = "benchmarks.broker_intake.staged_broker"
    async with intake(directory / "run", chunk_tokens, num_producers, None, module=module, kind=kind) as broker:
        rate = await broker.take(num_chunks)
        await broker.end()
    seconds = json.loads((directory / "run" / STAGES_FILE).read_text())
    costs = {label: 1e6 * seconds.get(label, 0.0) / rate.chunks for label in STAGES}
    whole = 1e6 * rate.cpu_s / rate.chunks
    return {**costs, "the rest": whole - sum(costs.values()), "all": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=24_000)
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--kind", choices=("gathered", "alone", "ready"), default="gathered", help=KIND_HELP)
    arguments = parser.parse_args()
    configure_logging("benchmark")
    with tempfile.TemporaryDirectory(prefix="broker-costs-") as directory:
        costs = asyncio.run(
            cost(Path(directory), arguments.chunk_tokens, arguments.chunks, arguments.producers, arguments.kind)
        )
    print("| stage | us of CPU a chunk |\n|---|---|")
    for label, value in costs.items():
        print(f"| {label} | {value:.1f} |")


if __name__ == "__main__":
    main()
