"""The tables of docs/evidence/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_report(figures: Mapping[str, Any]) -> None:
    """Print all tables, and whether the goals are met."""
    for line in report_lines(figures):
        print(line)


def report_lines(figures: Mapping[str, Any]) -> list[str]:
    """Markdown."""
    lines = []
    for row in figures["comparisons"]:
        lines += _comparison(row)
    if figures["growth"]:
        lines += _growth(figures["growth"])
    for goal in figures["goals"]:
        verdict = "holds" if goal["holds"] else "is missed"
        lines.append(
            f"{goal['model']}, {goal['dtype']}: {goal['ratio']} at least {goal['goal']:g} {verdict} ({goal['value']:.3f})"
        )
    return [
        *lines,
        "",
        f"{figures['seconds']:.0f} s in all, one thread, torch {figures['torch']}",
    ]


def _comparison(row: Mapping[str, Any]) -> list[str]:
    micro = row["micro_batches"]
    lines = [
        f"{row['model']}, {row['parameters'] / 1e6:.2f} M parameters, {row['dtype']}: {row['tokens']:,} tokens of "
        f"{row['sequences']} sequences, padding efficiency {row['padding_efficiency']:.2f}, {micro['packed']} packed "
        f"micro-batches ({micro['TRL']} padded), rounds: {row['rounds']}",
        "",
        "| step | CPU s | wall s | tokens / CPU s |",
        "|---|---|---|---|",
    ]
    for name, step in row["steps"].items():
        lines.append(f"| {name} | {step['cpu_s']:.3f} | {step['wall_s']:.3f} | {step['tokens_per_cpu_s']:,.0f} |")
    lines += ["", "| tokens per second | ratio (quartiles) | by wall clock |", "|---|---|---|"]
    for name, ratio in row["ratios"].items():
        lines.append(
            f"| {name} | {ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) | {ratio['wall_ratio']:.3f} |"
        )
    return [*lines, ""]


def _growth(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| what grows | value | M parameters | learner, tokens / CPU s | bare + AdamW | learner / bare |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        speeds = [f"{row[kind]['tokens_per_cpu_s']:,.0f}" for kind in ("learner", "bare")]
        size = f"{row['parameters'] / 1e6:.2f}"
        lines.append(f"| {row['what']} | {row['value']:,} | {size} | {' | '.join(speeds)} | {row['ratio']['ratio']:.3f} |")
    return [*lines, ""]
