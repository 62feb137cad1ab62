"""The memory of one rank of the learner as a table: each use, on its device and on its host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gspo_services.shared.estimates.amounts import BYTES, GIB, Span, brief, exactly
from gspo_services.shared.estimates.host import learner_host
from gspo_services.shared.estimates.learner import learner_memory
from gspo_services.shared.estimates.shape import ModelShape
from gspo_services.shared.settings import Settings

EXPORT_SHARD_BYTES: Final = 2.0 * GIB
"""max_shard_bytes of services/learner/export.py."""
NOTHING: Final = Span(0.0, 0.0)
_HEAD: Final = ("GiB", "device", "host", "rank 0 also")


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes of one use on each rank."""

    name: str
    device: Span = NOTHING
    """Without GPUs all of it is on the host."""
    host: Span = NOTHING
    host_of_rank_0: Span = NOTHING
    """What rank 0 has in addition."""

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Name and amounts in GiB; "-" for nothing."""
        return (self.name, _shown(self.device), _shown(self.host), _shown(self.host_of_rank_0))


def memory_rows(shape: ModelShape, settings: Settings, *, cuda: bool, teacher_parameters: int = 0) -> list[MemoryRow]:
    """Tabulate what each rank holds while it trains, publishes, saves and exports; the last row is the sum.

    Weights, gradients, masters and moments are tensors whose sizes are known; docs/guide/learner.md has the formulas.
    """
    memory = learner_memory(shape, settings, cuda=cuda, teacher_parameters=teacher_parameters)
    host = learner_host(shape, settings, memory)
    ranks = settings.learner.num_ranks
    version = float(BYTES[settings.model.dtype] * shape.parameters)
    rows = [
        _row("weights", memory.weights, memory.weights_on_host, cuda=cuda),
        _row("gradients", memory.gradients, memory.gradients_on_host, cuda=cuda),
        _row("masters and moments", memory.optimizer, memory.optimizer_on_host, cuda=cuda),
        _row("reference", memory.reference, 0.0, cuda=cuda),
        _row("teacher", memory.teacher, 0.0, cuda=cuda),
        _row("activations, logits", memory.activations, memory.activations_on_host, cuda=cuda),
        _row("gradients on their way", memory.bucket, 0.0, cuda=cuda),
        _row("gathered layers, process", memory.working, 0.0, cuda=cuda),
        MemoryRow(name="checkpoint", host=exactly(host.copies / ranks), host_of_rank_0=exactly(host.digests)),
        MemoryRow(name="versions", host_of_rank_0=host.snapshots)
        if settings.lora.is_used
        else MemoryRow(name="versions", host=host.snapshots * (1 / ranks)),
        MemoryRow(name="export", host_of_rank_0=exactly(min(EXPORT_SHARD_BYTES, version))),
    ]
    found = [row for row in rows if row.device.high or row.host.high or row.host_of_rank_0.high]
    together = MemoryRow(
        name="together",
        device=_sum(row.device for row in found),
        host=_sum(row.host for row in found),
        host_of_rank_0=_sum(row.host_of_rank_0 for row in found),
    )
    return [*found, together]


def memory_text(rows: Sequence[MemoryRow]) -> str:
    """Format the table in lines of equal width."""
    cells = [_HEAD, *(row.texts for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    )


def _row(name: str, device: Span | float, host: float, *, cuda: bool) -> MemoryRow:
    own = device if isinstance(device, Span) else exactly(device)
    if cuda:
        return MemoryRow(name=name, device=own, host=exactly(host))
    return MemoryRow(name=name, host=own + host)


def _sum(spans: Iterable[Span]) -> Span:
    return sum(spans, start=NOTHING)


def _shown(span: Span) -> str:
    if not span.high:
        return "-"
    low, high = brief(span.low / GIB), brief(span.high / GIB)
    return low if low == high else f"{low} to {high}"
