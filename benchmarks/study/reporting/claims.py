"""Every claim that a question decides by a rule fixed before its runs, with the verdict that the kept results give: the one
place where README.md and docs/evidence/study.md take results from. Open ones, and those without runs, are among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.markdown import table as markdown
from benchmarks.study import real_model
from benchmarks.study.questions import paper, settled
from benchmarks.study.questions.default import CALIBRATED, SETTINGS
from benchmarks.study.questions.lag import LENGTHS
from benchmarks.study.reporting import default, lag, margin
from benchmarks.study.reporting.summary import Interval, interval
from benchmarks.study.results import Results

LOSS_OF_A_PASS: Final = 0.015
"""Question f: so much less reward than with the proximal anchor's pass still counts as learning like it."""


class Finding(NamedTuple):
    """What a rule says of a claim."""

    verdict: str
    """shown, not shown, refuted, not refuted or open."""
    figure: str


@dataclass(frozen=True)
class Claim:
    """One claim, and where it was tested."""

    question: str
    text: str
    regime: str
    decide: Callable[[Results], Finding]
    in_readme: bool = False


def claims() -> list[Claim]:
    """Return every claim, the newest question last."""
    stale, product = "tiny, long answers, lags 0..8, eps tuned", "tiny, long answers, lags 0..2"
    deep = "deep, lag 0, eps 3e-3 and 0.2"
    many = f"{deep}, 16 updates a batch"
    lags = "tiny, all lengths, lags 0 to 32"
    shipped, tuned = "The calibrated range is the right default, eps untuned", "Tuned, it is ahead of other clips"
    return [
        Claim("f", "A calibrated range learns like the proximal anchor, without its pass", stale, _like_the_pass),
        Claim("f", "because widths follow the lag", stale, _because_of_lag),
        Claim("f", "Mismatch caps by lag are better than one number", stale, _caps_by_lag),
        Claim("g", "GRPO is unstable, or learns less than GSPO", deep, lambda found: _of_paper(found)[0]),
        Claim("g", "Routing Replay mends GRPO", deep, lambda found: _of_paper(found)[1]),
        Claim("g", "GSPO needs no replay", deep, lambda found: _of_paper(found)[2]),
        Claim("g", "Clipped shares are 100 times apart", deep, lambda found: _of_paper(found)[3]),
        Claim("g", "The engine's experts (R3) are better for GRPO than the learner's (R2)", deep, _engines_experts),
        Claim("i", shipped, product, _right_default, in_readme=True),
        Claim("i", tuned, product, _tuned, in_readme=True),
        Claim("j", "GSPO stands a higher rate than GRPO", many, lambda found: _margins(found)[0], in_readme=True),
        Claim("j", "GSPO without replay stands as high a rate as GRPO with it", many, lambda found: _margins(found)[1]),
        Claim("j", "GRPO does, at a hundredth of its eps", many, lambda found: _width(found, "GRPO")),
        Claim("j", "GSPO + replay does, at a fifth of its eps", many, lambda found: _width(found, "GSPO + replay")),
        *_on_a_real_model("SmolLM2, float32, CPU, lag 2", real_model.RESULTS_FILE),
        *_on_a_real_model("SmolLM2, bfloat16, H200, lag 2", real_model.GPU_FILE),
        Claim("l", "Spread masters learn faster", "SmolLM2, bfloat16, CPU, lag 2", _masters),
        Claim("m", "Two batches of lag cost a tuned width nothing", lags, lambda found: _lags(found, 0), in_readme=True),
        Claim("m", "Shipped, no rule lags further than the default", lags, lambda found: _lags(found, 1)),
        Claim("m", "Tuned, no rule lags further than one width", lags, lambda found: _lags(found, 2)),
    ]


def table(results: Results) -> str:
    """Return every claim as Markdown."""
    rows = [[each.question, each.text, *_told(each, results), each.regime] for each in claims()]
    return markdown(["question", "claim", "verdict", "measured", "model and regime"], rows)


def short_table(results: Results) -> str:
    """Return those of README.md."""
    told = [each for each in claims() if each.in_readme]
    rows = [[f"{each.text} ({each.regime})", f"**{each.decide(results).verdict}**"] for each in told]
    return markdown(["claim (where)", "verdict"], rows)


def _told(claim: Claim, results: Results) -> tuple[str, str]:
    found = claim.decide(results)
    return f"**{found.verdict}**", found.figure


def _like_the_pass(results: Results) -> Finding:
    less = _of_f(results, _candidate(results), settled.TRUNCATED)
    if less.mean - less.half_width > -LOSS_OF_A_PASS:
        return Finding("shown", less.text(3))
    return Finding("refuted" if less.mean + less.half_width < -LOSS_OF_A_PASS else "open", less.text(3))


def _candidate(results: Results) -> str:
    """Return the calibrated arm with the higher reward in tuning, at its chosen setting."""

    def tuned(arm: str) -> float:
        return results.mean("f-tune", arm, settled.column_of(*settled.CHOSEN[arm]), lambda run: run.area).mean

    return max((settled.CALIBRATED, settled.RECENTRED), key=tuned)


def _because_of_lag(results: Results) -> Finding:
    return _beats(results, _candidate(results), (settled.MATCHED, settled.SHUFFLED))


def _caps_by_lag(results: Results) -> Finding:
    numbers = (settled.TRUNCATED, "proximal, truncated at 1.02", "proximal, truncated at 2")
    return _beats(results, "proximal, truncated by lag", numbers)


def _beats(results: Results, arm: str, others: Iterable[str]) -> Finding:
    differences = [_of_f(results, arm, other) for other in others]
    ahead = all(each.mean - each.half_width > 0 for each in differences)
    return Finding("shown" if ahead else "not shown", "; ".join(each.text(3) for each in differences))


def _of_f(results: Results, arm: str, other: str) -> Interval:
    return results.paired("f", arm, other, ["chosen"], lambda run: run.area)


def _of_paper(results: Results) -> list[Finding]:
    """Apply the four parts of question g's rule."""
    gspo, grpo, replay = (results.at("g", arm, paper.COLUMN) for arm in ("GSPO", "GRPO", "GRPO + Routing Replay"))
    fallen = {
        name: sum(run.collapsed for run in runs.values()) for name, runs in (("GSPO", gspo), ("GRPO", grpo), ("R", replay))
    }
    less, mended, unneeded = (
        interval([one[seed].area - other[seed].area for seed in paper.SEEDS])
        for one, other in ((grpo, gspo), (replay, grpo), (replay, gspo))
    )
    unstable = fallen["GRPO"] >= 2 and fallen["GSPO"] == 0
    first = "shown" if unstable or less.mean + less.half_width < 0 else "open"
    if fallen["GRPO"] == 0 and less.mean >= 0:
        first = "refuted"
    second = "shown" if first == "shown" and fallen["R"] == 0 and mended.mean - mended.half_width > 0 else "open"
    if fallen["R"] == fallen["GRPO"] and mended.mean <= 0:
        second = "refuted"
    third = "shown" if fallen["GSPO"] == 0 and unneeded.mean <= 0 else "open"
    if fallen["GSPO"] >= 2 or unneeded.mean - unneeded.half_width > 0:
        third = "refuted"
    times = [gspo[seed].mean_clip / grpo[seed].mean_clip for seed in paper.SEEDS]
    fourth = "shown" if min(times) > 30 else "refuted" if max(times) < 10 else "open"
    return [
        Finding(first, less.text(3)),
        Finding(second, mended.text(3)),
        Finding(third, unneeded.text(4)),
        Finding(fourth, ", ".join(f"{each:.0f}" for each in times)),
    ]


def _engines_experts(results: Results) -> Finding:
    r3, r2 = (results.at("g-engine", arm, paper.ENGINE_COLUMN) for arm in ("GRPO + R3", "GRPO + R2"))
    differences = [r3[seed].area - r2[seed].area for seed in paper.ENGINE_SEEDS]
    less = interval(differences)
    ahead = min(differences) > 0 and less.mean - less.half_width > 0
    return Finding("shown" if ahead else "refuted" if less.mean <= 0 else "open", less.text(3))


def _right_default(results: Results) -> Finding:
    winner, (told, _) = default.verdict(results), _of_default(results, "shipped")
    return Finding("shown" if winner == CALIBRATED else "open" if winner == "open" else "refuted", told)


def _tuned(results: Results) -> Finding:
    """Apply the separation of question i to what is tuned: two arms are apart if the interval of six pairs excludes 0."""
    told, less = _of_default(results, "tuned")
    return Finding("shown" if all(each.mean - each.half_width > 0 for each in less) else "not shown", told)


def _of_default(results: Results, column: str) -> tuple[str, list[Interval]]:
    """Return what calibrated has more than each other arm that clips."""
    seeds = default.whole_seeds(results)
    less = {arm: default.of_six(results, CALIBRATED, arm, column, seeds) for arm in SETTINGS if arm != CALIBRATED}
    return "; ".join(f"{arm} {each.text(3)}" for arm, each in less.items()), list(less.values())


def _margins(results: Results) -> list[Finding]:
    first, second = margin.verdict(results)
    means = {arm: sum(margin.margin(results, arm, seed) for seed in margin.SEEDS) / len(margin.SEEDS) for arm in margin.ARMS}
    told = {arm: f"{means[margin.GSPO]:.0f} doublings against {means[arm]:.0f}" for arm in (margin.GRPO, margin.GRPO_REPLAY)}
    replayed = f"; with replay {means['GSPO + replay']:.0f}"
    return [Finding(first, told[margin.GRPO] + replayed), Finding(second, told[margin.GRPO_REPLAY])]


def _width(results: Results, arm: str) -> Finding:
    fallen = sum(run.collapsed for run in margin.narrower_runs(results, arm).values())
    return Finding(margin.verdict_on_width(results, arm), f"{fallen} of {len(margin.SEEDS)} collapse")


def _on_a_real_model(regime: str, path: Path) -> list[Claim]:
    def decide(index: int, other: str) -> Callable[[Results], Finding]:
        def finding(_: Results) -> Finding:
            outcomes = real_model.kept(path)
            less = real_model.less(outcomes, real_model.DEFAULT, other)[1]
            said = real_model.verdicts(outcomes)[index].rpartition(": ")[2].rstrip(".")
            return Finding(said, f"{other} {less.text(3)}")

        return finding

    return [
        Claim("k", "The default is not behind", regime, decide(0, "proximal")),
        Claim("k", "The paper's width is too narrow", regime, decide(1, "fixed")),
        Claim("k", "What calibration gives is the width, without tuning", regime, decide(2, "constant")),
    ]


def _masters(_: Results) -> Finding:
    outcomes = real_model.kept(real_model.BFLOAT16_FILE)
    less = real_model.less(outcomes, real_model.SPREAD, real_model.MIDDLE)[1]
    return Finding(real_model.masters_verdict(outcomes).rpartition(": ")[2].rstrip("."), less.text(3))


def _lags(results: Results, part: int) -> Finding:
    found = {}
    for length in LENGTHS:
        try:
            found[length] = lag.verdict(results, length)[part]
        except ValueError:
            return Finding("open", "no runs yet" if lag.missing(results, length) == lag.NUM_RUNS else "runs are missing")
    said = set(found.values())
    verdict = said.pop() if len(said) == 1 else "open"
    return Finding(verdict, ", ".join(f"{length}: {each}" for length, each in found.items()))
