"""The cost of the loss in time and memory: GSPO-token compared with plain policy gradient, on the same packed tokens.

make bench-loss            # or: python benchmarks/loss_cost.py --tokens 1000000 --repeats 5 --json loss_cost.json

Plain policy gradient is -1/N sum_i 1/n_i sum_t A_t log pi(y_t), with the weights A_t / (N n_i) computed beforehand: one
multiplication and one sum. Two comparisons:

- a step: log-probs from hidden states (output embedding, log-softmax, gather, in chunks), loss, backward. The hidden
  states and the embedding have the size of the smallest model here. The model before them is left out, and larger heads
  and models make the share of the loss smaller.
- the loss alone: given log-probs, loss and backward.

Both kinds take turns in one process with one thread. Times are CPU seconds of the process, so that other work on the
machine matters little. Memory is the peak growth of the resident set, with a new process for each size.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo import Objective, objective_loss
from gspo.model.logprobs import chunked_logprobs

HIDDEN, VOCABULARY, CHUNK_TOKENS = 64, 264, 512
MEAN_LENGTH = 500
MAX_RATIO = 1.15
LOSSES = ("plain", "gspo")


@dataclass(frozen=True)
class Packed:
    """T tokens of S sequences, end to end; one token in eight is an observation."""

    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    behaviour_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    sequence_ids_T: Tensor
    plain_weights_T: Tensor
    lag_S: Tensor

    @property
    def num_sequences(self) -> int:
        return self.lag_S.shape[0]


def packed(num_tokens: int, *, with_head: bool) -> Packed:
    """Draw a random batch; without a head the hidden states are empty. Ratios scatter about as widely as the clip."""
    generator = torch.Generator().manual_seed(0)
    num_sequences = max(1, num_tokens // MEAN_LENGTH)
    cuts = torch.randperm(num_tokens - 1, generator=generator)[: num_sequences - 1] + 1
    sequence_ids_T = torch.zeros(num_tokens, dtype=torch.int64).index_fill_(0, cuts, 1).cumsum(0)
    mask_T = torch.rand(num_tokens, generator=generator) < 7 / 8
    advantages_S = torch.randn(num_sequences, generator=generator)
    n_S = torch.zeros(num_sequences).index_add_(0, sequence_ids_T, mask_T.float()).clamp(min=1)
    targets_T = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    hidden_TH = torch.randn(num_tokens if with_head else 0, HIDDEN, generator=generator)
    weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5
    advantages_T = torch.where(mask_T, advantages_S[sequence_ids_T], 0.0)
    behaviour_T = -3 * torch.rand(num_tokens, generator=generator)
    if with_head:
        behaviour_T = log_probs(hidden_TH, weight_VH, targets_T)
    drift_S = 5e-4 * torch.randn(num_sequences, generator=generator)
    return Packed(
        hidden_TH=hidden_TH.requires_grad_(),
        weight_VH=weight_VH.requires_grad_(),
        targets_T=targets_T,
        behaviour_T=behaviour_T - drift_S[sequence_ids_T],
        advantages_T=advantages_T,
        mask_T=mask_T,
        sequence_ids_T=sequence_ids_T,
        plain_weights_T=advantages_T / n_S[sequence_ids_T] / num_sequences,
        lag_S=torch.zeros(num_sequences),
    )


def log_probs(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> Tensor:
    ones_T = torch.ones(targets_T.shape[0])
    return chunked_logprobs(hidden_TH, weight_VH, targets_T, ones_T, chunk_tokens=CHUNK_TOKENS).logprobs_T


def loss(kind: str, batch: Packed, logprobs_T: Tensor) -> Tensor:
    """Return the loss: "plain", or "gspo" as the learner calls it, with checks, clip range, statistics and mismatch KL."""
    if kind == "plain":
        return -(logprobs_T * batch.plain_weights_T).sum()
    output = objective_loss(
        Objective.gspo(),
        logprobs_T,
        batch.behaviour_T,
        batch.advantages_T,
        batch.mask_T,
        batch.sequence_ids_T,
        lag_S=batch.lag_S,
        sigma=0.0,
        num_sequences=batch.num_sequences,
    )
    return output.loss


def step(kind: str, batch: Packed) -> None:
    """Run log-probs, loss and backward."""
    loss(kind, batch, log_probs(batch.hidden_TH, batch.weight_VH, batch.targets_T)).backward()
    batch.hidden_TH.grad = batch.weight_VH.grad = None


def loss_alone(kind: str, batch: Packed) -> None:
    """Run loss and backward at given log-probs."""
    loss(kind, batch, batch.behaviour_T.clone().requires_grad_()).backward()


def take_turns(work: Callable[[str, Packed], None], batch: Packed, repeats: int) -> dict[str, Any]:
    """Return CPU seconds of each kind (medians), and their ratio: its median over the rounds and its quartiles."""
    seconds: dict[str, list[float]] = {kind: [] for kind in LOSSES}
    for round_number in range(repeats + 1):
        for kind in LOSSES if round_number % 2 else reversed(LOSSES):
            gc.collect()
            start = time.process_time()
            work(kind, batch)
            if round_number > 0:  # the first round warms up
                seconds[kind].append(time.process_time() - start)
    ratios = [ours / plain for ours, plain in zip(seconds["gspo"], seconds["plain"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "plain_s": statistics.median(seconds["plain"]),
        "gspo_s": statistics.median(seconds["gspo"]),
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "repeats": repeats,
    }


def peak_growth_bytes(kind: str, num_tokens: int, *, with_head: bool) -> int:
    """Return the peak growth of this process's resident set in one loss and backward, after a small one to warm up."""
    work = step if with_head else loss_alone
    work(kind, packed(1000, with_head=with_head))
    batch = packed(num_tokens, with_head=with_head)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # restart the peak from the current resident set
    before = _status_bytes("VmRSS")
    work(kind, batch)
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def memory(sizes: list[int], *, with_head: bool) -> list[dict[str, Any]]:
    """Return the peak growth in bytes by number of tokens, each figure from its own process."""
    # Every tensor gets its own mapping, gone when freed: reused memory from building the batch would hide growth.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384"}
    rows = []
    for num_tokens in sizes:
        row: dict[str, Any] = {"tokens": num_tokens}
        for kind in LOSSES:
            command = [sys.executable, __file__, "--measure-memory", kind, "--tokens", str(num_tokens)]
            command += ["--with-head"] if with_head else []
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            row[f"{kind}_bytes"] = int(done.stdout)
            row[f"{kind}_bytes_per_token"] = int(done.stdout) / num_tokens
        rows.append(row)
    return rows


def main() -> int:
    """Measure and print; 1 if the step costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--measure-memory", choices=LOSSES, help=argparse.SUPPRESS)
    parser.add_argument("--with-head", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure_memory:
        print(peak_growth_bytes(arguments.measure_memory, arguments.tokens, with_head=arguments.with_head))
        return 0
    small = [size for size in (10_000, 100_000) if size < arguments.tokens]
    figures: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "tokens": arguments.tokens,
        "hidden": HIDDEN,
        "vocabulary": VOCABULARY,
        "step": take_turns(step, packed(arguments.tokens, with_head=True), arguments.repeats),
        "loss_alone": [
            {"tokens": size} | take_turns(loss_alone, packed(size, with_head=False), 3 * arguments.repeats)
            for size in (*small, arguments.tokens)
        ],
        "memory_step": memory([arguments.tokens], with_head=True),
        "memory_loss_alone": memory([arguments.tokens // divisor for divisor in (8, 4, 2, 1)], with_head=False),
    }
    figures["holds"] = figures["step"]["ratio"] <= MAX_RATIO
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["holds"] else 1


def report(figures: dict[str, Any]) -> None:
    """Print the tables of docs/evidence/results.md."""
    print(f"{figures['tokens']:,} packed tokens, hidden {HIDDEN}, vocabulary {VOCABULARY}, float32, one thread\n")
    print("| CPU seconds | plain | GSPO | ratio (quartiles) |\n|---|---|---|---|")
    for name, row in (
        ("log-probs, loss, backward", figures["step"]),
        *((f"loss and backward alone, {row['tokens']:,} tokens", row) for row in figures["loss_alone"]),
    ):
        low, high = row["ratio_quartiles"]
        print(f"| {name} | {row['plain_s']:.4g} | {row['gspo_s']:.4g} | {row['ratio']:.4g} ({low:.4g} to {high:.4g}) |")
    print("\n| peak memory, bytes per token | plain | GSPO |\n|---|---|---|")
    for name, rows in (("log-probs, loss, backward", "memory_step"), ("loss and backward alone", "memory_loss_alone")):
        for row in figures[rows]:
            plain, ours = row["plain_bytes_per_token"], row["gspo_bytes_per_token"]
            print(f"| {name}, {row['tokens']:,} tokens | {plain:.0f} | {ours:.0f} |")
    verdict = "holds" if figures["holds"] else "does not hold"
    print(f"\nAt most {MAX_RATIO} times the step without GSPO: {verdict} ({figures['step']['ratio']:.4f}).")


if __name__ == "__main__":
    sys.exit(main())
