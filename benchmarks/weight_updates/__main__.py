"""The cost of a weight update: bytes of deltas, speed of the codec, bytes that the learner sends, the pause of generation.

    python -m benchmarks.weight_updates                                   all parts, some 6 minutes on an idle machine
    python -m benchmarks.weight_updates --parts sizes rates --json out.json

sizes   a small Qwen3-MoE in bfloat16 with float32 master weights under AdamW: bytes of each step's delta
rates   encoding and applying a delta, compared with memcpy, tile sums and zstd of the same bytes, on one core
learner what a version costs a rank: CPU seconds a GB by stage, by the share of changed elements and by ranks; memory
fleet   a snapshot and a delta to 1..32 receivers over loopback, with and without weight peers: bytes that the learner sent
copy    what a version costs a rollout's process: bytes read and written, and CPU seconds, by three ways
pause   a real SGLang server: how long generation stops, compared with SGLang's own time to load the same file
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.markdown import table as markdown
from benchmarks.weight_updates.copy import LAYERS, VERSIONS, copy
from benchmarks.weight_updates.fleet import fleet
from benchmarks.weight_updates.learner import learner
from benchmarks.weight_updates.pause import pause
from benchmarks.weight_updates.rates import rates
from benchmarks.weight_updates.sizes import sizes

FLEETS: Final = (1, 2, 4, 8, 16, 32)
PAUSES: Final = 10

PARTS: Final[dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]]] = {
    "sizes": lambda _: sizes(),
    "rates": lambda _: rates(),
    "learner": lambda arguments: learner(arguments.gigabytes),
    "fleet": lambda arguments: fleet(arguments.fleets),
    "copy": lambda arguments: copy(arguments.layers, arguments.versions),
    "pause": lambda arguments: pause(arguments.updates),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--fleets", nargs="+", type=int, default=list(FLEETS), help="numbers of receivers")
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1.0], help="of models whose publication is measured")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model whose copies are measured; each has 39 MiB")
    parser.add_argument("--versions", type=int, default=VERSIONS, help="versions of that model; all are kept in memory")
    parser.add_argument("--updates", type=int, default=PAUSES, help="updates of each kind in the measurement of the pause")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, list[dict[str, Any]]] = {}
    for part in arguments.parts:
        figures[part] = PARTS[part](arguments)
        print(f"\n{part}\n\n{table(figures[part])}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
