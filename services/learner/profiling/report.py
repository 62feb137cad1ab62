"""Writes a profile: a JSON line per batch during the run, and a table of all batches at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final, Protocol

import structlog
import torch

from gspo_services.learner.profiling.flops import ModelCost, peak_tflops
from gspo_services.learner.profiling.profile import (
    NO_PROFILE,
    PHASES,
    BatchProfile,
    DeviceTimeline,
    HostTimeline,
    Phases,
    StepProfile,
)
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.settings import Settings

log = structlog.get_logger()

LINES_FILE: Final = "profile.jsonl"
TABLE_FILE: Final = "profile.md"


class ProfiledEngine(Protocol):
    """What a profile needs of ``gspo_services.learner.engine.LearnerEngine``."""

    rank: int
    world_size: int
    device: torch.device
    profile: Phases

    @property
    def max_tokens_per_micro_batch(self) -> int: ...
    def cost(self) -> ModelCost: ...


class ProfileFiles:
    """The files of rank 0: ``profile.jsonl`` in the run's directory grows; ``profile.md`` has this process's batches."""

    def __init__(self, directory: Path) -> None:
        """Makes ``directory`` if it is not there. Raises: OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        self._lines, self._table = directory / LINES_FILE, directory / TABLE_FILE
        self._batches: list[BatchProfile] = []

    def add(self, batch: BatchProfile) -> None:
        """Append a line, write the table again, and log the largest phases. Raises: OSError."""
        self._batches.append(batch)
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(as_json(batch)) + "\n")
        self._table.write_text("\n".join(table(self._batches)) + "\n", encoding="utf-8")
        shares = sorted(((seconds / batch.total_s, phase) for phase, seconds in batch.seconds.items()), reverse=True)
        log.info(
            "batch_profiled",
            batch=batch.batch,
            total_s=round(batch.total_s, 3),
            tokens_per_s=round(batch.tokens / batch.total_s),
            **{phase: f"{share:.0%}" for share, phase in shares[:4]},
        )

    def close(self) -> None:
        """Log the table, line by line, and the files' places."""
        for line in table(self._batches) if self._batches else []:
            log.info("profile", line=line)
        log.info("profile_written", batches=len(self._batches), table=str(self._table), lines=str(self._lines))


@contextmanager
def profiled(settings: Settings, engine: ProfiledEngine, clock: Clock) -> Iterator[Phases]:
    """Inside the block: a profile that is written, if the settings ask for one; otherwise one that does nothing."""
    if not settings.learner.profile:
        yield NO_PROFILE
        return
    files = ProfileFiles(settings.run.directory) if engine.rank == 0 else None
    profile = StepProfile(
        DeviceTimeline() if engine.device.type == "cuda" else HostTimeline(clock),
        rank=engine.rank,
        world_size=engine.world_size,
        max_tokens_per_micro_batch=engine.max_tokens_per_micro_batch,
        cost=engine.cost(),
        peak_flops=_peak_flops(settings, engine.device),
        report=_ignore if files is None else files.add,
    )
    engine.profile = profile
    try:
        yield profile
    finally:
        if files is not None:
            files.close()


def _ignore(_: BatchProfile) -> None:
    """Report nothing: rank 0 writes for all."""


def _peak_flops(settings: Settings, device: torch.device) -> float | None:
    tflops = settings.learner.peak_tflops
    if tflops is None and device.type == "cuda" and settings.learner.dtype == "bfloat16":
        tflops = peak_tflops(torch.cuda.get_device_name(device))
    return None if tflops is None else tflops * 1e12


def as_json(batch: BatchProfile) -> dict[str, object]:
    """Return all fields and the values derived from them, as plain JSON values."""
    return asdict(batch) | {
        "seconds": batch.seconds,
        "total_s": batch.total_s,
        "tokens_per_s": batch.tokens / batch.total_s,
        "compute_tokens_per_s": batch.tokens / batch.compute_s if batch.compute_s else None,
        "imbalance": batch.imbalance,
        "mfu": batch.mfu,
    }


def table(batches: list[BatchProfile]) -> list[str]:
    """Markdown: over all batches, the seconds per batch by phase, then the figures that are not times."""
    count = len(batches)
    total_s = sum(batch.total_s for batch in batches)
    tokens = sum(batch.tokens for batch in batches)
    compute_s = sum(batch.compute_s for batch in batches)
    lines = ["| phase | s per batch | slowest rank | share |", "|---|---|---|---|"]
    for phase in PHASES:
        seconds, slowest = (sum(part) for part in zip(*((b.seconds[phase], b.slowest[phase]) for b in batches), strict=True))
        lines.append(f"| {phase} | {seconds / count:.4f} | {slowest / count:.4f} | {seconds / total_s:.1%} |")
    lines.append(f"| all | {total_s / count:.4f} | | 100.0% |")
    lines += ["", "| figure | value |", "|---|---|"]
    flops = sum(batch.flops for batch in batches)
    ranks = len(batches[0].rank_seconds)
    mean = {
        "packing efficiency": sum(batch.packing_efficiency for batch in batches) / count,
        "padding efficiency of rows padded to the longest": sum(batch.padding_efficiency for batch in batches) / count,
        "largest rank's tokens over the mean": sum(batch.imbalance for batch in batches) / count,
    }
    lines += [
        f"| batches, ranks | {count}, {ranks} |",
        f"| tokens a batch | {tokens / count:,.0f} |",
        f"| tokens/s, of all time | {tokens / total_s:,.0f} |",
        f"| tokens/s, while tokens are trained | {tokens / compute_s:,.0f} |" if compute_s else "| tokens/s | |",
        f"| micro-batches a rank and batch | {sum(batch.num_micro_batches for batch in batches) / count:.1f} |",
        *(f"| {name} | {value:.3f} |" for name, value in mean.items()),
        f"| model FLOPs a token | {flops / max(1, tokens):,.0f} |",
    ]
    if compute_s:
        lines.append(f"| model GFLOP/s of a rank, while tokens are trained | {flops / compute_s / ranks / 1e9:,.2f} |")
    peak = batches[0].peak_flops
    if peak is not None and compute_s:
        lines.append(f"| MFU, of {peak / 1e12:g} TFLOP/s | {flops / (compute_s * ranks * peak):.1%} |")
    return lines
