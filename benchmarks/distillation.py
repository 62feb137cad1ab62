"""Whether a teacher's log-probs bring the policy nearer to the teacher than rewards alone do.

    python -m benchmarks.distillation --seeds 0 1 2 --plot docs/evidence/images/distillation.png

The teacher is the demo's model after the demo: it answers 9 of 10 problems. The pupil is the model that the teacher was
before, and takes examples/arithmetic.toml as shipped, for 30 batches, in three arms: the demo's reward alone (the teacher is
asked, and counts a billionth), reward and teacher, and teacher alone. The measure is KL(pupil || teacher) in nats a token,
of the tokens that were sampled, averaged over batches; differences are taken between runs of one seed.

Fixed before the first run: the teacher helps if the KL with it, with and without reward, is lower than by reward alone in
every seed. Refuted if a mean is not lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.markdown import table as markdown
from benchmarks.whole_runs import options, place, seeded_run

NUM_BATCHES: Final = 30
REWARD: Final = "reward alone"
ARMS: Final = {
    REWARD: ("distillation.coefficient=1e-9",),
    "reward and teacher": (),
    "teacher alone": ("distillation.only=true",),
}


@dataclass(frozen=True)
class Curve:
    """One run."""

    arm: str
    seed: int
    kl: list[float]
    """By batch, nats a token."""
    rewards: list[tuple[int, float]]
    """Held out: batches trained before it, and the mean."""


def main() -> None:
    """Run, print, plot."""
    parser = options(__doc__, "runs/distillation", [0, 1, 2])
    parser.add_argument(
        "--plot", type=Path, default=Path("runs/distillation/distillation.png"), help="(default: %(default)s)"
    )
    arguments = parser.parse_args()
    curves = [
        curve(arguments.config, arm, seed, arguments.directory, arguments.overrides)
        for seed in arguments.seeds
        for arm in ARMS
    ]
    print(f"{place(arguments.config)}\n\n{table(curves)}")
    plot(curves, arguments.plot)


def curve(config: Path, arm: str, seed: int, root: Path, overrides: Sequence[str]) -> Curve:
    """Make what is missing: the teacher, the run. A finished run is measured again, an unfinished one goes on."""
    taught = root / f"taught-{seed}"
    if not (taught / "export" / "config.json").is_file():
        seeded_run(config, taught, seed, "evaluation.every_batches=0", *overrides)
    settings = (f"run.num_batches={NUM_BATCHES}", f"distillation.teacher={(taught / 'export').absolute()}", *ARMS[arm])
    metrics = seeded_run(config, root / f"{list(ARMS).index(arm)}-{seed}", seed, *settings, *overrides)
    return Curve(
        arm=arm,
        seed=seed,
        kl=[row["teacher_kl/all"] for row in metrics.batches],
        rewards=[(each.batch, each.reward) for each in metrics.evaluations],
    )


def table(curves: Sequence[Curve]) -> str:
    """Return Markdown: a line per arm, and the verdict."""
    seeds = sorted({curve.seed for curve in curves})
    kl = {(curve.arm, curve.seed): fmean(curve.kl) for curve in curves}
    numbers = ", ".join(map(str, seeds))
    measured = f"KL to the teacher, nats a token, seeds {numbers}"
    rows, worse = [], list[str]()
    for arm in ARMS:
        own = [curve for seed in seeds for curve in curves if (curve.arm, curve.seed) == (arm, seed)]
        differences = [kl[arm, seed] - kl[REWARD, seed] for seed in seeds]
        worse += [arm] if arm != REWARD and max(differences) >= 0 else []
        columns = (
            arm,
            ", ".join(f"{kl[arm, seed]:.3f}" for seed in seeds),
            "-" if arm == REWARD else f"{fmean(differences):+.3f} ({min(differences):+.3f} to {max(differences):+.3f})",
            ", ".join(f"{fmean(curve.kl[-5:]):.3f}" for curve in own),
            ", ".join(f"{curve.rewards[-1][1]:.2f}" for curve in own),
        )
        rows.append(columns)
    said = f"not in every seed: {', '.join(worse)}" if worse else "in every seed, with and without reward"
    heads = ["arm", measured, "less reward alone", "last 5 batches", "last reward"]
    return f"{markdown(heads, rows)}\n\nA teacher lowers the KL more than reward alone {said}."


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Draw KL and held-out reward over batches: a thin line for each seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for index, arm in enumerate(ARMS):
        own, color = [curve for curve in curves if curve.arm == arm], f"C{index}"
        for curve in own:
            left.plot(range(1, 1 + len(curve.kl)), curve.kl, color=color, alpha=0.3, linewidth=0.8)
            right.plot(*zip(*curve.rewards, strict=True), color=color, alpha=0.3, linewidth=0.8)
        mean = [fmean(values) for values in zip(*(curve.kl for curve in own), strict=True)]
        left.plot(range(1, 1 + len(mean)), mean, color=color, linewidth=2, label=arm)
        at = [batch for batch, _ in own[0].rewards]
        mean = [fmean(values) for values in zip(*([reward for _, reward in curve.rewards] for curve in own), strict=True)]
        right.plot(at, mean, color=color, linewidth=2)
    left.set(xlabel="batch", ylabel="KL(pupil || teacher), nats a token", ylim=(0, None))
    right.set(xlabel="batches trained", ylabel="held-out reward", ylim=(0, 1))
    left.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
