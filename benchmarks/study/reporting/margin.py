"""The table of question j, and its rule as it was fixed beforehand (benchmarks/study/questions/margin.py)."""

from __future__ import annotations

import math
from typing import Final

from benchmarks.markdown import table as markdown
from benchmarks.study.questions.margin import ARMS, BETWEEN, NARROW_RATE, NARROWER, RATES, SEEDS
from benchmarks.study.reporting.summary import Interval, RunSummary, interval
from benchmarks.study.reporting.tables import collapsed, percent, signed
from benchmarks.study.results import Results

GSPO, GRPO, GRPO_REPLAY, _ = ARMS
ALL_RATES: Final = tuple(sorted(RATES + BETWEEN))


def found(results: Results, arm: str, rate: float) -> dict[int, RunSummary]:
    """Return the finished runs by seed."""
    return results.at("j" if rate in RATES else "j-between", arm, f"lr {rate:g}")


def needed_between(results: Results, arm: str, seed: int) -> float | None:
    """Return the rate between the last without a collapse and the first with one; None where nothing lies between.

    Raises: KeyError for a run of j that is missing.
    """
    first = next((rate for rate in RATES if _run(results, arm, seed, rate).collapsed), None)
    if first is None or first == RATES[0]:
        return None
    return BETWEEN[RATES.index(first) - 1]


def margin(results: Results, arm: str, seed: int) -> float:
    """Return log2 of the highest rate below the first collapse over the lowest of all; -1 if that one collapses.

    Raises: KeyError for a run that is missing.
    """
    between = needed_between(results, arm, seed)
    tried = sorted(RATES if between is None else (*RATES, between))
    sound = 0
    while sound < len(tried) and not _run(results, arm, seed, tried[sound]).collapsed:
        sound += 1
    return math.log2(tried[sound - 1] / RATES[0]) if sound else -1.0


def missing(results: Results) -> list[tuple[str, int, float]]:
    """Return arm, seed and rate of the runs that the rule still needs; of j-between once it is known which."""
    left = []
    for seed in SEEDS:
        for arm in ARMS:
            of_j = [rate for rate in RATES if seed not in found(results, arm, rate)]
            if of_j:
                left += [(arm, seed, rate) for rate in of_j]
                continue
            between = needed_between(results, arm, seed)
            if between is not None and seed not in found(results, arm, between):
                left.append((arm, seed, between))
    return left


def verdict(results: Results) -> tuple[str, str]:
    """Apply both parts of the rule: "shown", "refuted" or "open". Raises: ValueError while a run is missing."""
    if left := missing(results):
        raise ValueError(f"{len(left)} runs are missing: the rule asks for four whole seeds")
    over, beside = less(results, GRPO), less(results, GRPO_REPLAY)
    low, high = (over.mean - over.half_width, beside.mean + beside.half_width)
    first = "shown" if low > 0 or min(_differences(results, GRPO)) > 0 else "refuted" if over.mean <= 0 else "open"
    second = "shown" if min(_differences(results, GRPO_REPLAY)) >= 0 else "refuted" if high < 0 else "open"
    return first, second


def missed_its_aim(results: Results) -> bool:
    """Whether the regime tells nothing: GRPO collapses at no rate, or every arm does at the lowest."""
    never = all(not run.collapsed for rate in ALL_RATES for run in found(results, GRPO, rate).values())
    return never or all(run.collapsed for arm in ARMS for run in found(results, arm, RATES[0]).values())


def less(results: Results, other: str, arm: str = GSPO) -> Interval:
    """Return the mean of the differences of two arms' margins, in octaves, with Student's 95 % interval."""
    return interval(_differences(results, other, arm))


def comparison(results: Results) -> str:
    """One row per arm; until all runs are there, only how many are missing."""
    if left := missing(results):
        return f"{len(left)} runs are missing."
    head = ["objective", "margin, seeds 400 to 403", "mean", f"less *{GRPO}*", f"less *{GRPO_REPLAY}*"]
    rows = []
    for arm in ARMS:
        margins = [margin(results, arm, seed) for seed in SEEDS]
        others = ("-" if arm == other else signed(less(results, other, arm)) for other in (GRPO, GRPO_REPLAY))
        rows.append(
            [
                arm,
                ", ".join(f"{each:.0f}" for each in margins),
                f"{sum(margins) / len(margins):.2f}",
                *others,
                *(_rewards(list(found(results, arm, rate).values())) for rate in ALL_RATES),
            ]
        )
    return markdown([*head, *(f"at {rate:g}" for rate in ALL_RATES)], rows)


def widths(results: Results) -> str:
    """One row per arm of j-eps below the same arm of j."""
    compared = {GSPO: found(results, GSPO, NARROW_RATE)}
    for arm in NARROWER:
        compared |= {arm: found(results, arm, NARROW_RATE), f"{arm}, narrower": narrower_runs(results, arm)}
    rows = []
    for name, by_seed in compared.items():
        runs = list(by_seed.values())
        clipped = percent(interval([run.mean_clip for run in runs]).mean)
        eps = " / ".join(f"{runs[0].config[side]:g}" for side in ("eps_low", "eps_high")) if runs else "-"
        rows.append([name, eps, clipped, f"{interval([run.final for run in runs]).mean:.2f}", collapsed(runs)])
    return markdown(["objective", "eps", "clipped", "at the end", "collapsed"], rows)


def verdict_on_width(results: Results, arm: str) -> str:
    """Apply the rule of j-eps to one of its arms. Raises: ValueError while a run is missing."""
    runs = narrower_runs(results, arm)
    if left := set(SEEDS) - set(runs):
        raise ValueError(f"{len(left)} runs are missing: the rule asks for four whole seeds")
    fallen = sum(run.collapsed for run in runs.values())
    return "shown" if fallen <= 1 else "refuted" if fallen == len(SEEDS) else "open"


def narrower_runs(results: Results, arm: str) -> dict[int, RunSummary]:
    """Return the finished runs of j-eps of an arm, by seed."""
    return results.at("j-eps", f"{arm}, narrower", f"lr {NARROW_RATE:g}")


def _rewards(runs: list[RunSummary]) -> str:
    """Return the reward at the end and how many collapsed."""
    return f"{interval([run.final for run in runs]).mean:.2f} ({collapsed(runs)})" if runs else "-"


def _differences(results: Results, other: str, arm: str = GSPO) -> list[float]:
    return [margin(results, arm, seed) - margin(results, other, seed) for seed in SEEDS]


def _run(results: Results, arm: str, seed: int, rate: float) -> RunSummary:
    return found(results, arm, rate)[seed]
