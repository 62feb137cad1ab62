"""Question j: how large may the learning rate be before a run collapses?

Fixed on 2026-11-26, before the first run. Question g saw no collapse, so it did not test the paper's claim of stability.

**Regime.** That of question g (volatile experts, long answers), with 16 updates a batch: 128 answers in 16 groups, and 50
batches, so that there are as many updates as in g. (100 were planned. Before the first run it was clear that 80 such runs
take 26 CPU hours.) Start models 400 to 403. A run has collapsed as study.md defines it: it diverged, or
ended below half of its best or below its start.

**Runs.** Seed by seed: j has every arm at 5e-5, 2e-4 and 8e-4 (48 runs). j-between has 1e-4 and 4e-4 (32 runs): needed
is, for each arm and seed, the one between its last rate without a collapse and its first with one.

**Margin** of an arm and seed: the highest rate below its first collapse, as log2(rate / 5e-5); -1 if 5e-5 collapses. A
rate that was not needed counts as the rates around it, which agree.

**Rule**, on differences of the margin between runs of one seed, with Student's 95 % interval over four seeds:

1. *GSPO is stabler than GRPO* (primary): shown if GSPO less GRPO is above 0 in each seed, or its interval lies above 0.
   Refuted if the mean is not above 0. Open otherwise.
2. *GSPO needs no replay to be as stable as GRPO with it*: shown if GSPO less GRPO + replay is below 0 in no seed. Refuted
   if its interval lies below 0. Open otherwise.

What replay adds to each is described. The regime has missed its aim if GRPO collapses at no rate, or every arm does at
5e-5. The rule is applied once, to four whole seeds of j with what they need of j-between; a seed counts whole or not at
all.

**The width** (j-eps), fixed on 2026-11-28 after that rule was applied and before its own first run; it changes nothing of j.
No eps was fitted, so GSPO may stand more because it clips more: at 2e-4 it clips 30 % of the sequences, GSPO + replay 8 %,
GRPO 1 % of the tokens. At 2e-4 therefore GRPO again at a hundredth of its eps, and GSPO + replay at a fifth, because replay
brings ratios five times closer to 1. For each of the two: *the width is what j saw* is shown if at most one seed of four
collapses, refuted if all four do, open otherwise. Four whole seeds or nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from benchmarks.study.config import RunConfig
from benchmarks.study.questions.paper import REGIME as OF_THE_PAPER
from benchmarks.study.questions.paper import TOKEN_RATIO

REGIME: Final = replace(OF_THE_PAPER, num_batches=50, num_sequences=128, num_mini_batches=16, eval_every=5)
REPLAY: Final[dict[str, Any]] = {"routing_replay": True}
ARMS: Final[dict[str, dict[str, Any]]] = {
    "GSPO": {},
    "GRPO": TOKEN_RATIO,
    "GRPO + replay": {**TOKEN_RATIO, **REPLAY},
    "GSPO + replay": REPLAY,
}
RATES: Final = (5e-5, 2e-4, 8e-4)
BETWEEN: Final = (1e-4, 4e-4)
SEEDS: Final = (400, 401, 402, 403)
NARROW_RATE: Final = 2e-4
NARROWER: Final[dict[str, dict[str, Any]]] = {
    "GRPO": {"eps_low": 2e-3, "eps_high": 2.7e-3},
    "GSPO + replay": {"eps_low": 6e-4, "eps_high": 8e-4},
}


def comparison() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of the runs that every arm needs."""
    return _at(RATES)


def between() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of those of which each arm and seed needs one at most."""
    return _at(BETWEEN)


def narrower() -> list[tuple[str, str, RunConfig]]:
    """Row, column and configuration of two arms with a narrower clip range."""
    at_rate = replace(REGIME, learning_rate=NARROW_RATE)
    return [
        (f"{arm}, narrower", f"lr {NARROW_RATE:g}", replace(at_rate, seed=seed, **{**ARMS[arm], **eps}))
        for arm, eps in NARROWER.items()
        for seed in SEEDS
    ]


def _at(rates: tuple[float, ...]) -> list[tuple[str, str, RunConfig]]:
    return [
        (arm, f"lr {rate:g}", replace(REGIME, seed=seed, learning_rate=rate, **values))
        for seed in SEEDS
        for rate in rates
        for arm, values in ARMS.items()
    ]
