"""How near each clip range's gradient is to the true one, in a policy small enough to enumerate.

python -m benchmarks.study.exact.gradient --seeds 20

One batch holds answers of lags 0..8 in equal shares, from former weights with engine noise, and the learner makes four steps
on it. All arms see the same weights: a history of noisy steps along the true gradient. At each step an arm's expected
gradient is compared with that of on-policy GSPO by its cosine, at a scale of its bounds at which it clips a given share. It
needs seconds, and says only which forms are worth training with.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.study.exact.policy import (
    NUM_PROMPTS,
    Answers,
    all_answers,
    probabilities,
    rewards,
    standard_advantages,
    start_table,
    token_logprobs,
    true_gradient,
)
from gspo.calibration import NOTHING_MEASURED, Calibration, LagCalibration, Measured

MAX_LAG = 8
STEPS = 4
EPS_LOW, EPS_HIGH = 3e-3, 4e-3
SAMPLES = 128
SCALES = (2.0**-14, 2.0**14)
BISECTIONS = 40


@dataclass(frozen=True)
class Scene:
    """Weights of one batch: the versions that sampled it by lag, as the engine has them, and the learner's at each step."""

    engine_D: list[Tensor]
    learner_K: list[Tensor]
    answers: Answers
    rewards_PY: Tensor
    calibration: Calibration


@dataclass(frozen=True)
class Arm:
    """How a batch is clipped: z deviations of what was measured, or c; how its widths are dealt; and its anchor."""

    z: float = 0.0
    growth: float = 0.0
    recentre: bool = False
    control: str = ""
    proximal: bool = False
    log_cap: Callable[[Tensor, Tensor], Tensor] | None = None
    reject: bool = False


def make_scene(seed: int, *, step: float, step_noise: float, engine_noise: float) -> Scene:
    """Walk along the true gradient with noise of ``step_noise`` times its length; ``engine_noise``: nats, on logits."""
    generator = torch.Generator().manual_seed(seed)
    answers = all_answers()
    rewards_PY = rewards(answers, seed)
    table = start_table(seed)
    versions = [table]
    for _ in range(MAX_LAG + STEPS - 1):
        gradient = true_gradient(table, answers, rewards_PY).reshape(table.shape)
        noise = torch.randn(table.shape, generator=generator, dtype=torch.float64)
        noise *= step_noise * gradient.norm() / noise.norm()
        table = table + step * (gradient + noise) / gradient.norm()
        versions.append(table)
    sampled = versions[: MAX_LAG + 1][::-1]
    noisy = [each + engine_noise * torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in sampled]
    scene = Scene(noisy, versions[MAX_LAG:], answers, rewards_PY, NOTHING_MEASURED)
    return replace(scene, calibration=measure(scene, generator))


def measure(scene: Scene, generator: torch.Generator) -> Calibration:
    """Sample from each version, as a run does, and let the library estimate."""
    calibration = LagCalibration(window=SAMPLES)
    start_PYL = token_logprobs(scene.learner_K[0], scene.answers)
    mask_YL, tokens_Y = scene.answers.mask_YL, scene.answers.num_tokens_Y
    for lag, engine in enumerate(scene.engine_D):
        delta_PYL = start_PYL - token_logprobs(engine, scene.answers)
        mean_PY = delta_PYL.sum(dim=2) / tokens_Y
        square_PY = torch.where(mask_YL, delta_PYL - mean_PY[:, :, None], 0.0).square().sum(dim=2)
        variance_PY = square_PY / (tokens_Y - 1).clamp(min=1)
        chosen = torch.multinomial(probabilities(engine, scene.answers).flatten(), SAMPLES, True, generator=generator)
        columns = (each.flatten()[chosen].tolist() for each in (tokens_Y.expand_as(mean_PY), mean_PY, variance_PY))
        calibration.update([Measured(float(lag), *sampled) for sampled in zip(*columns, strict=True)])
    return calibration.current


def widths(scene: Scene, arm: Arm, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each lag the location [Y] and the margin [Y] by which an arm's bounds lie elsewhere than eps says."""
    tokens_Y = scene.answers.num_tokens_Y
    locations, margins = [], []
    for lag in range(MAX_LAG + 1):
        location, between, token = scene.calibration.at(torch.full_like(tokens_Y, lag))
        locations.append(location if arm.recentre else torch.zeros_like(location))
        margins.append(arm.z * (between + token / tokens_Y).sqrt())
    if arm.control == "matched":
        mean = torch.stack(margins).mean()
        margins = [mean.expand_as(tokens_Y) for _ in margins]
    elif arm.control == "shuffled":
        table = torch.stack(margins)
        order = torch.rand(table.shape, generator=generator).argsort(dim=0)
        margins = list(table.gather(0, order))
    return locations, margins


def arm_gradient(scene: Scene, arm: Arm, step: int, scale: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return an arm's expected gradient at a step, flat, and the share that it clips by lag [D]."""
    locations, margins = widths(scene, arm, torch.Generator().manual_seed(seed))
    leaf = scene.learner_K[step].clone().requires_grad_()
    logprobs_PYL = token_logprobs(leaf, scene.answers)
    now_PY = logprobs_PYL.sum(dim=2)
    start_PY = token_logprobs(scene.learner_K[0], scene.answers).sum(dim=2)
    tokens_Y = scene.answers.num_tokens_Y
    total, shares = torch.zeros((), dtype=torch.float64), []
    for lag, engine in enumerate(scene.engine_D):
        engine_PY = token_logprobs(engine, scene.answers).sum(dim=2)
        mu_PY = engine_PY.exp()
        advantage_PY = standard_advantages(mu_PY, scene.rewards_PY)
        weight_PY = torch.ones_like(mu_PY)
        if arm.log_cap is not None:
            log_weight_PY = (start_PY - engine_PY) / tokens_Y
            cap_Y = arm.log_cap(torch.full_like(tokens_Y, lag), tokens_Y)
            weight_PY = torch.minimum(log_weight_PY, cap_Y).exp()
            if arm.reject:
                weight_PY = torch.where(log_weight_PY.abs() > cap_Y, 0.0, log_weight_PY.exp())
        log_s_PY = ((now_PY - (start_PY if arm.proximal else engine_PY)) / tokens_Y).detach()
        growth = 1 + arm.growth * lag
        high_Y = locations[lag] + scale * growth * math.log1p(EPS_HIGH) + margins[lag]
        low_Y = locations[lag] + scale * growth * math.log1p(-EPS_LOW) - margins[lag]
        clipped_PY = ((advantage_PY > 0) & (log_s_PY > high_Y)) | ((advantage_PY < 0) & (log_s_PY < low_Y))
        shares.append((mu_PY * clipped_PY).sum() / NUM_PROMPTS)
        factor_PY = torch.where(clipped_PY, 0.0, mu_PY * weight_PY * advantage_PY * log_s_PY.exp() / tokens_Y)
        total = total + (factor_PY * now_PY).sum() / NUM_PROMPTS / len(scene.engine_D)
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient.flatten(), torch.stack(shares)


def at_share(scene: Scene, arm: Arm, step: int, share: float) -> tuple[Tensor, Tensor]:
    """The gradient and the shares at the scale of the bounds at which the arm clips ``share`` of the batch; 0: nothing."""
    if share == 0:
        return arm_gradient(scene, arm, step, math.inf)
    low, high = SCALES
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        clipped = float(arm_gradient(scene, arm, step, middle)[1].mean())
        low, high = (middle, high) if clipped > share else (low, middle)
    return arm_gradient(scene, arm, step, high)


def arms(scene: Scene) -> dict[str, Arm]:
    """The arms of the comparison."""

    def constant(cap: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda lag_Y, tokens_Y: torch.full_like(tokens_Y, math.log(cap))

    def by_lag(lag_Y: Tensor, tokens_Y: Tensor) -> Tensor:
        location, between, token = scene.calibration.at(lag_Y)
        return (location + 2 * (between + token / tokens_Y).sqrt()).clamp(min=0)

    return {
        "fixed": Arm(),
        "c = 1": Arm(growth=1.0),
        "calibrated": Arm(z=1.0),
        "calibrated, re-centred": Arm(z=1.0, recentre=True),
        "constant width of the same mean": Arm(z=1.0, control="matched"),
        "the same widths at random": Arm(z=1.0, control="shuffled"),
        "proximal, off": Arm(proximal=True),
        "proximal, truncated at 1.1": Arm(proximal=True, log_cap=constant(1.1)),
        "proximal, truncated at 2": Arm(proximal=True, log_cap=constant(2.0)),
        "proximal, truncated by lag": Arm(proximal=True, log_cap=by_lag),
        "proximal, rejected at 1.1": Arm(proximal=True, log_cap=constant(1.1), reject=True),
    }


def main() -> None:
    """Print one row for each arm and share: the mean cosine, its standard error, and the clipped share of lags 0 and 8."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--step", type=float, default=0.2, help="length of a version's step in the table of logits")
    parser.add_argument("--step-noise", type=float, default=2.0, help="noise of a step, by its length")
    parser.add_argument("--engine-noise", type=float, default=0.01, help="nats, on logits")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.15, 0.3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    scenes = [
        make_scene(seed, step=options.step, step_noise=options.step_noise, engine_noise=options.engine_noise)
        for seed in range(options.seeds)
    ]
    print("| clipped | arm | cosine to the true gradient | clipped at lag 0 | at lag 8 |\n|---|---|---|---|---|")
    for share in options.shares:
        for name in arms(scenes[0]):
            cosines, first, last = [], [], []
            for scene in scenes:
                found, shares = at_share(scene, arms(scene)[name], STEPS - 1, share)
                true = true_gradient(scene.learner_K[STEPS - 1], scene.answers, scene.rewards_PY)
                cosines.append(float(torch.nn.functional.cosine_similarity(found, true, dim=0)))
                first.append(float(shares[0]))
                last.append(float(shares[-1]))
            mean = torch.tensor(cosines).mean()
            error = torch.tensor(cosines).std() / math.sqrt(len(cosines))
            share_0, share_8 = sum(first) / len(first), sum(last) / len(last)
            print(f"| {share:.0%} | {name} | {mean:.3f} ± {error:.3f} | {share_0:.0%} | {share_8:.0%} |", flush=True)


if __name__ == "__main__":
    main()
