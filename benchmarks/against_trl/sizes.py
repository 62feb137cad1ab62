"""Seconds of a batch of this project and of TRL by model size, which shows how much of them the model takes.

    .venv-parity/bin/python -m benchmarks.against_trl.sizes

The configuration of ``benchmarks.against_trl`` with untrained models: answers reach the maximum length and nothing is
learnt, but a batch is the same work. The figure is the median of the later batches, without evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.against_trl.curve import Run
from benchmarks.against_trl.ours import run_ours
from benchmarks.against_trl.settings import OURS, THEIRS, TIMEOUT_S, say
from benchmarks.against_trl.theirs import run_theirs
from gspo_services.shared.settings import load_settings

FIRST: Final = 3
"""Batches before this one (counted from 1) are warm-up: the pipeline fills, allocators and caches warm up."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen3-MoE like the tiny one, wider and deeper: heads of 16, experts as wide as the model."""

    hidden_size: int
    num_layers: int

    def __str__(self) -> str:
        return f"{self.hidden_size} x {self.num_layers}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse a text such as "256x4". Raises: ValueError for any other text."""
        hidden, separator, layers = text.partition("x")
        if not (separator and hidden.isdigit() and layers.isdigit() and int(layers) > 0 and int(hidden) > 0):
            raise ValueError(f"{text!r} is no shape: give WIDTHxLAYERS, such as 256x4")
        if int(hidden) % 32:
            raise ValueError(f"{text!r}: the width must be a multiple of 32, two heads of 16")
        return cls(hidden_size=int(hidden), num_layers=int(layers))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Both systems on one model."""

    shape: Shape
    parameters: int
    ours: Run
    theirs: Run

    @property
    def ratio(self) -> float:
        """Our seconds per batch over TRL's."""
        return self.ours.seconds_of_a_later_batch(FIRST) / self.theirs.seconds_of_a_later_batch(FIRST)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| width x layers | parameters | seconds of a batch: ours | TRL | ratio | CPU seconds: ours | TRL |"]
    lines.append("|" + "---|" * 7)
    for row in rows:
        seconds = [run.seconds_of_a_later_batch(FIRST) for run in (row.ours, row.theirs)]
        cpu = [sum(run.cpu_s.values()) for run in (row.ours, row.theirs)]
        lines.append(
            f"| {row.shape} | {row.parameters:,} | {seconds[0]:.2f} | {seconds[1]:.2f} | {row.ratio:.2f} | "
            f"{cpu[0]:.2f} | {cpu[1]:.2f} |"
        )
    return "\n".join(lines)


def make_model(directory: Path, shape: Shape, like: Path, seed: int) -> int:
    """Write an untrained model with the tokenizer and other settings of ``like``; return its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(like)
    config.hidden_size = config.intermediate_size = config.moe_intermediate_size = shape.hidden_size
    config.num_hidden_layers = shape.num_layers
    config.num_attention_heads = shape.hidden_size // config.head_dim
    config.num_key_value_heads = config.num_attention_heads // 2
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    directory.mkdir(parents=True)
    for path in like.iterdir():
        if path.name.startswith("tokenizer") or path.name in ("chat_template.jinja", "special_tokens_map.json"):
            shutil.copy(path, directory)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/arithmetic.toml"))
    parser.add_argument(
        "--shapes", type=Shape.parse, nargs="+", default=[Shape.parse(each) for each in ("64x2", "256x4", "512x6")]
    )
    parser.add_argument("--batches", type=int, default=7, help="batches of each run (default: %(default)s)")
    parser.add_argument("--ours", choices=OURS, default="1 server")
    parser.add_argument("--theirs", choices=THEIRS, default="2 threads")
    parser.add_argument(
        "--like", type=Path, default=Path("models/tiny"), help="the model that lends its tokenizer and configuration"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/against-trl-sizes.json"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    overrides = [f"run.num_batches={arguments.batches}", "evaluation.every_batches=0"]
    settings = load_settings(arguments.config, overrides)
    samples = settings.batch.groups_per_batch * settings.batch.group_size
    rows = []
    with tempfile.TemporaryDirectory(prefix="against-trl-") as name:
        for shape in arguments.shapes:
            place = Path(name) / str(shape).replace(" ", "")
            parameters = make_model(place / "model", shape, arguments.like, settings.run.seed)
            common = [*overrides, f"model.path={place / 'model'}"]
            say(f"{shape}, {parameters:,} parameters: this project, {arguments.ours}")
            ours = run_ours(
                arguments.config,
                place / "ours",
                [*common, *OURS[arguments.ours]],
                setting=arguments.ours,
                seed=settings.run.seed,
                timeout_s=TIMEOUT_S,
            )
            say(f"  {ours}")
            say(f"{shape}: TRL, {arguments.theirs}")
            theirs = run_theirs(
                arguments.config,
                place / "theirs",
                common,
                setting=arguments.theirs,
                trl=THEIRS[arguments.theirs],
                seed=settings.run.seed,
                samples_per_batch=samples,
                timeout_s=TIMEOUT_S,
            )
            say(f"  {theirs}")
            rows.append(Row(shape=shape, parameters=parameters, ours=ours, theirs=theirs))
    print(f"\n{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {' '.join(sys.argv[1:])}\n\n{table(rows)}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
