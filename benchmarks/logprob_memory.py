"""Peak memory of log-probs, forward and backward: the learner's chunks compared with log_softmax and gather.

make bench-logprobs        # or: python -m benchmarks.logprob_memory --json logprob_memory.json

Hidden states [T, H] and an output embedding [V, H] are float32 with H = 64, so that memory that depends on T x V stands
out. The figure is the peak growth of the resident set beyond hidden states and embedding, each in its own process. Both
ways need the gradients of the hidden states (T x H) and of the embedding (V x H). In addition, log_softmax and gather hold
logits, log-softmax and their gradients (T x V, three times); the chunks hold two times the bytes of one chunk
(``chunk_tokens`` rows, at most CHUNK_BYTES), or up to KEPT_BYTES for a small softmax that is kept.

Where log_softmax and gather would need more than --limit-gib they are not measured, and the table shows an estimate.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gspo.model.logprobs import CHUNK_BYTES, KEPT_BYTES, chunked_logprobs, rows_at_once

HIDDEN, CHUNK_TOKENS = 64, 512
VOCABULARIES = (1_024, 8_192, 32_768, 151_936)
TOKENS = (1_024, 4_096, 16_384)
MIB = 2**20
WAYS = ("chunks", "log_softmax")


def expected_bytes(way: str, num_tokens: int, vocabulary: int) -> int:
    """Return the bytes needed besides the gradients of the inputs, from the tensors that the module docstring counts."""
    whole = 4 * num_tokens * vocabulary
    if way == "log_softmax":
        return 3 * whole
    chunk = 4 * vocabulary * min(num_tokens, rows_at_once(vocabulary, CHUNK_TOKENS, cuda=False))
    return 2 * chunk + (whole if whole <= KEPT_BYTES else 0)


def gradients_bytes(num_tokens: int, vocabulary: int) -> int:
    """Return the bytes of the gradients of hidden states and embedding."""
    return 4 * HIDDEN * (num_tokens + vocabulary)


def step(way: str, num_tokens: int, vocabulary: int) -> None:
    """Compute log-probs of random targets and their sum, and run backward."""
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
    weight_VH = torch.randn(vocabulary, HIDDEN, generator=generator).requires_grad_()
    targets_T = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    _start_peak()
    if way == "chunks":
        temperatures_T = torch.ones(num_tokens)
        logprobs_T = chunked_logprobs(
            hidden_TH, weight_VH, targets_T, temperatures_T, chunk_tokens=CHUNK_TOKENS, with_entropy=True
        ).logprobs_T
    else:
        logprobs_T = torch.log_softmax(hidden_TH @ weight_VH.t(), dim=-1).gather(-1, targets_T[:, None])
    logprobs_T.sum().backward()


def peak_growth_bytes(way: str, num_tokens: int, vocabulary: int) -> int:
    """Return the peak growth of this process's resident set in one forward and backward, after a small one to warm up."""
    step(way, 32, 128)
    step(way, num_tokens, vocabulary)
    return _status_bytes("VmHWM") - _resident_before[-1]


_resident_before: list[int] = []


def _start_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # restart the peak from the current resident set
    _resident_before.append(_status_bytes("VmRSS"))


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def measured(way: str, num_tokens: int, vocabulary: int) -> dict[str, Any]:
    """Measure one size in its own process."""
    # Every tensor gets its own mapping, which disappears when freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.logprob_memory", "--measure", way, str(num_tokens), str(vocabulary)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    growth, cpu_s = done.stdout.split()
    return {"bytes": int(growth), "cpu_s": float(cpu_s)}


def rows(tokens: Sequence[int], vocabularies: Sequence[int], limit_bytes: int) -> list[dict[str, Any]]:
    """Return a row per size; None for log_softmax where it would need more than the limit."""
    found = []
    for vocabulary in vocabularies:
        for num_tokens in tokens:
            row: dict[str, Any] = {"vocabulary": vocabulary, "tokens": num_tokens}
            row["gradients_bytes"] = gradients_bytes(num_tokens, vocabulary)
            for way in WAYS:
                expected = expected_bytes(way, num_tokens, vocabulary)
                row[f"{way}_expected_bytes"] = expected + row["gradients_bytes"]
                row[way] = measured(way, num_tokens, vocabulary) if expected <= limit_bytes else None
            found.append(row)
    return found


def extra_bytes(row: dict[str, Any]) -> int:
    """Return the bytes that the chunks take besides the gradients."""
    return int(row["chunks"]["bytes"]) - int(row["gradients_bytes"])


def is_bounded(row: dict[str, Any]) -> bool:
    """Tell whether they keep the bound, whatever T and V: three chunks or a kept softmax, and 64 MiB of slack."""
    return extra_bytes(row) <= max(3 * CHUNK_BYTES[False], KEPT_BYTES) + 64 * MIB


def report(figures: dict[str, Any]) -> list[str]:
    """Return the table of docs/evidence/performance.md, in MiB."""
    lines = [
        "| vocabulary | tokens | chunks, MiB | of that gradients | log_softmax and gather, MiB | ratio | T x V x 4, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures["rows"]:
        ours, theirs = row["chunks"]["bytes"], row["log_softmax"]
        other = f"{theirs['bytes'] / MIB:,.0f}" if theirs else f"(about {row['log_softmax_expected_bytes'] / MIB:,.0f})"
        ratio = f"{theirs['bytes'] / ours:.1f}" if theirs else ""
        whole = 4 * row["vocabulary"] * row["tokens"] / MIB
        lines.append(
            f"| {row['vocabulary']:,} | {row['tokens']:,} | {ours / MIB:,.0f} | {row['gradients_bytes'] / MIB:,.0f} | "
            f"{other} | {ratio} | {whole:,.0f} |"
        )
    verdict = "holds" if figures["holds"] else "does not hold"
    return [*lines, "", f"Bounded besides the gradients, whatever T and V: {verdict}. {figures['seconds']:.0f} s."]


def main() -> int:
    """Measure and print; 1 if the chunks are not bounded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--limit-gib", type=float, default=4.0, help="most that log_softmax may take (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "TOKENS", "VOCABULARY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure:
        way, num_tokens, vocabulary = arguments.measure
        print(peak_growth_bytes(way, int(num_tokens), int(vocabulary)), time.process_time())
        return 0
    begin = time.monotonic()
    found = rows(arguments.tokens, arguments.vocabularies, int(arguments.limit_gib * 2**30))
    figures = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "hidden": HIDDEN,
        "chunk_tokens": CHUNK_TOKENS,
        "rows": found,
        "holds": all(map(is_bounded, found)),
        "seconds": time.monotonic() - begin,
    }
    print("\n".join(report(figures)))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if figures["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
