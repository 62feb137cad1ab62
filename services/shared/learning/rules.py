"""The rules: each looks at the newest batches and says what is wrong with them, or nothing. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gspo_services.shared.learning.findings import BOUNDS, FindingName, LearningFinding, Row

LEVEL: Final = 5
"""Batches whose mean is a level of the run."""
NAMED: Final = 8
ALL: Final = "*"


@dataclass(kw_only=True)
class Past:
    """What the rules need of older lines."""

    first: list[Row] = field(default_factory=list)
    """The first batch: the policy as it was."""
    best_reward: float = -math.inf
    """The best mean reward of LEVEL batches in a row."""
    silent: list[Row] = field(default_factory=list)
    """The newest batches that had no signal, in a row: the first and the last NAMED."""
    num_silent: int = 0
    num_silent_groups: float = 0.0
    had_signal: bool = False
    evaluations: list[Row] = field(default_factory=list)
    """The best one by held-out reward, and the newest BOUNDS["held_out_falls"].batches."""
    reward_at_best: float = math.nan
    """The training reward when the best evaluation was made."""
    counted: frozenset[str] | None = None
    """Components that count in the reward, ALL for all of them; None: unknown."""


CHANCE: Final = 2.5
"""Standard errors of the difference of two levels."""
LEAST_MISMATCH: Final = 1e-2
"""Nats a token: tokens sampled across an update of a float32 pair have 2e-3, others 1e-6."""
OWN_NOISE: Final = 5.0
"""Times the noise of the first batch."""
Judge = Callable[[Sequence[Row], Past], LearningFinding | None]


def measure(row: Row, name: str) -> float:
    """A measure of a line; NaN where it has none."""
    value = row.get(name)
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100 else math.nan
    )


def column(rows: Sequence[Row], name: str) -> list[float]:
    return [measure(row, name) for row in rows]


def mean(rows: Sequence[Row], name: str) -> float:
    """The mean over the lines that have the measure; NaN where none has."""
    known = [value for value in column(rows, name) if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def is_silent(row: Row) -> bool:
    """Whether no answer of the batch had an advantage. A line that does not say had some."""
    signal = measure(row, "signal_sequences/all")
    if not math.isnan(signal):
        return signal == 0
    return measure(row, "num_zero_advantage_groups") >= measure(row, "groups/all") > 0


def no_signal(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """No group has had an advantage for some time."""
    bound = BOUNDS["no_signal"]
    if past.num_silent < bound.batches or past.num_silent_groups < bound.value:
        return None
    found = silence(past.silent, had_signal=past.had_signal)
    groups, filtered = (
        past.num_silent_groups,
        sum(value for value in column(past.silent, "num_filtered_groups") if value > 0),
    )
    more = f", and {filtered:.0f} more were filtered out" if filtered else ""
    return LearningFinding(
        name="no_signal",
        since=past.silent[0]["batch"],
        text=f"no signal: {found.text}; {groups:.0f} of {groups:.0f} groups of {past.num_silent} batches had none{more}",
        advice=found.advice,
        figures={"batches": past.num_silent, "groups": groups},
        is_wrong=not found.is_solved,
    )


@dataclass(frozen=True, kw_only=True)
class NoSignal:
    """Why batches have no signal."""

    text: str
    advice: str
    is_solved: bool
    """All answers are right, after there was something to learn."""


def silence(rows: Sequence[Row], *, had_signal: bool) -> NoSignal:
    """Say what the rewards of batches without a signal are like."""
    rewards = [value for value in column(rows, "reward_mean") if not math.isnan(value)]
    spread = max((value for value in column(rows, "reward_std") if not math.isnan(value)), default=0.0)
    low, high = (min(rewards), max(rewards)) if rewards else (math.nan, math.nan)
    is_one_value = spread < 1e-9 and high - low < 1e-9
    is_solved = is_one_value and low >= 1 and had_signal
    text, advice = _kind_of_silence(low, is_one_value=is_one_value, is_solved=is_solved, had_signal=had_signal)
    return NoSignal(text=text, advice=advice, is_solved=is_solved)


def _kind_of_silence(low: float, *, is_one_value: bool, is_solved: bool, had_signal: bool) -> tuple[str, str]:
    if is_one_value and low == 0 and had_signal:
        return "every answer was wrong (reward 0), and some were right before", (
            "The policy has broken, or its tasks became too hard: resume from a checkpoint before it with a smaller "
            "learner.learning_rate, or take easier tasks"
        )
    if is_one_value and low == 0:
        return "every answer was wrong (reward 0)", (
            "Compare some answers with the expected ones: a wrong gold column, answer marker or chat template, or a turn "
            "that is too short, gives 0 to right answers too. If they are really wrong, take easier tasks or give parts of "
            "the reward (docs/guide/rewards.md)"
        )
    if is_solved:
        return "every answer was right (reward 1)", "The tasks are solved: the run can end, or take harder ones"
    if is_one_value:
        return f"every answer had the reward {low:.4g}", (
            "A reward that is the same for all teaches nothing: check the reward function or model with `gspo env try`; if "
            "the answers deserve it, take other tasks"
        )
    return "within each group all rewards were alike", (
        "Answers to one task do not differ: raise sampling.temperature, enlarge batch.group_size, take tasks that are "
        "solved sometimes, or set data.dynamic_sampling = true"
    )


def cut_off(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    shares = column(rows, "length/cut_off")
    if not all(share >= BOUNDS["cut_off"].value for share in shares):
        return None
    limit = mean(rows, "sampling/max_turn_tokens")
    return LearningFinding(
        name="cut_off",
        since=rows[0]["batch"],
        text=f"at least {min(shares):.0%} of the answers were cut off by a limit, at {mean(rows, 'length/mean'):.1f} tokens "
        f"on average (max_turn_tokens {limit:.0f})",
        advice="Raise sampling.max_turn_tokens or sampling.max_tokens; if answers never end, check the model's end token "
        "and chat template",
        figures={"cut_off": min(shares), "length": mean(rows, "length/mean")},
    )


def entropy(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """The policy's entropy has collapsed or exploded, and the reward is no better for it."""
    first, now, bound = mean(past.first, "entropy/all"), mean(rows, "entropy/all"), BOUNDS["entropy"]
    if not (first > 0) or not _is_no_better(rows, past):
        return None
    if now > bound.value * first and not (now > 2 * first and now > first + 0.5):
        return None
    fell = now <= first
    return LearningFinding(
        name="entropy",
        since=rows[0]["batch"],
        text=f"the entropy {'collapsed' if fell else 'exploded'}: from {first:.3g} to {now:.3g} nats a token, while the "
        f"reward went from {mean(past.first, 'reward_mean'):.3g} to {mean(rows, 'reward_mean'):.3g}",
        advice="Resume from a checkpoint before it with a smaller learner.learning_rate, and "
        + ("a higher sampling.temperature" if fell else "a clip range that is not wider than the default"),
        figures={"entropy": now, "first_entropy": first},
    )


def length(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """Answers have become much shorter or longer, and the reward is no better for it."""
    first, now, bound = mean(past.first, "length/mean"), mean(rows, "length/mean"), BOUNDS["length"]
    if not (first > 0) or not _is_no_better(rows, past) or bound.value * first < now < first / bound.value:
        return None
    if math.isnan(now):
        return None
    return LearningFinding(
        name="length",
        since=rows[0]["batch"],
        text=f"the answers became much {'shorter' if now < first else 'longer'}: from {first:.1f} to {now:.1f} tokens, "
        "while the reward did not rise",
        advice="Read some answers: repeated text, or none, is what a broken policy writes. Resume from a checkpoint before "
        "it with a smaller learner.learning_rate, and check what the reward says of length",
        figures={"length": now, "first_length": first},
    )


def _is_no_better(rows: Sequence[Row], past: Past) -> bool:
    """Whether the newest rewards are below 0.8 of the best level by more than chance, or no better than the first one. Those
    of a ladder's levels cannot be compared.
    """
    if any(key.startswith("level/") for key in rows[-1]):
        return False
    first, now = mean(past.first, "reward_mean"), mean(rows, "reward_mean")
    best = max(past.best_reward, first)
    # The answers of a group are alike, so groups are counted; the best of many levels is high by chance.
    groups = sum(value for value in column(rows, "groups/all") if not math.isnan(value))
    chance = CHANCE * mean(rows, "reward_std") * math.sqrt(2 / groups) if groups else 0.0
    return now < best - max(0.2 * abs(best), 0.0 if math.isnan(chance) else chance) or now <= first + 0.01


def one_component(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """Only one component of the reward ever differs: nothing is learned of the others."""
    prefix, counted = "train/reward/", past.counted
    if counted is None or sum(column(rows, "num_trajectories")) < 256:
        return None
    names = [key.removeprefix(prefix) for key in rows[-1] if key.startswith(prefix)]
    parts = {name: column(rows, prefix + name) for name in names if name in counted or ALL in counted}
    same = {name: values[0] for name, values in parts.items() if max(values) - min(values) < BOUNDS["one_component"].value}
    moving = [name for name in parts if name not in same]
    stuck = {name: value for name, value in same.items() if value != 1}  # A component that is always earned is no fault.
    if len(moving) != 1 or not stuck:
        return None
    shown = ", ".join(f"{name} was {value:.4g} in every batch" for name, value in list(stuck.items())[:NAMED])
    return LearningFinding(
        name="one_component",
        since=rows[0]["batch"],
        text=f"the reward is {moving[0]} alone: {shown}",
        advice="Compare some answers with the expected ones: if the constant component should have been earned, its code is "
        "wrong; if the tasks are too hard for it, the policy learns only the other one",
        figures=stuck,
    )


def held_out_falls(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """The held-out reward falls while the training reward rises."""
    bound = BOUNDS["held_out_falls"]
    best, *newest = past.evaluations
    if len(newest) < bound.batches:
        return None
    top, error = measure(best, "eval/reward"), measure(best, "eval/reward_error")
    for each in newest:
        spread = math.hypot(error, measure(each, "eval/reward_error"))
        if not (top - measure(each, "eval/reward") > bound.value * spread):
            return None
    now = mean(rows, "reward_mean")
    if not (now > past.reward_at_best):
        return None
    last = measure(newest[-1], "eval/reward")
    return LearningFinding(
        name="held_out_falls",
        since=newest[0]["batch"],
        text=f"the held-out reward fell from {top:.3g} (after {best['batch']} batches) to {last:.3g} while the training "
        f"reward rose from {past.reward_at_best:.3g} to {now:.3g}",
        advice="Use the best checkpoint (`gspo export --checkpoint best`). More tasks, fewer batches or a smaller "
        "learner.learning_rate help against learning by heart; if the splits are graded or asked differently, align them",
        figures={"held_out": last, "best": top, "training": now},
    )


def clipped(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """Nearly every answer with an advantage was clipped, and taught nothing."""
    parts = [
        (measure(row, "clip_fraction/all") * measure(row, "sequences/all"), measure(row, "signal_sequences/all"))
        for row in rows
    ]
    signal = sum(each for _, each in parts)
    share = sum(each for each, _ in parts) / signal if signal > 0 else math.nan
    if not (share >= BOUNDS["clipped"].value):
        return None
    return LearningFinding(
        name="clipped",
        since=rows[0]["batch"],
        text=f"{min(share, 1):.0%} of the answers with an advantage were clipped, so that nearly none taught anything "
        f"(clip range {mean(rows, 'clip_range_low/all'):.2g} to {mean(rows, 'clip_range_high/all'):.2g})",
        advice="Use the default clip range (objective.eps_low, eps_high, clip_calibration), a smaller "
        "learner.learning_rate, or fewer batch.mini_batches",
        figures={"clipped": share},
    )


def mismatch(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """Engine and learner give the same tokens other probabilities, on one version: more than this pair did at first."""
    sigmas = column(rows, "mismatch_sigma")
    first, far = mean(past.first, "mismatch_sigma"), mean(rows, "mismatch_far")
    most = min(far, BOUNDS["mismatch"].value) if far > 0 else BOUNDS["mismatch"].value
    bound = max(LEAST_MISMATCH, min(most, OWN_NOISE * first) if first > 0 else most)
    if not all(sigma >= bound for sigma in sigmas):
        return None
    return LearningFinding(
        name="mismatch",
        since=rows[0]["batch"],
        text=f"engine and learner differ by {sigmas[-1]:.2g} nats a token (mismatch_sigma) with the same weights, where "
        f"{bound:.2g} is much",
        advice="They must have the same model files, precision, temperature and chat template: compare rollout.server_url's "
        "server, model.dtype and learner.dtype",
        figures={"mismatch_sigma": sigmas[-1], "bound": bound},
    )


def no_effect(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """There is a signal, and the weights do not follow it."""
    if any(is_silent(row) for row in rows):
        return None
    rate, grad = mean(rows, "learning_rate"), max(column(rows, "grad_norm_max"))
    farthest = max(
        abs(value - 1) for row in rows for value in (measure(row, "ratio_min/all"), measure(row, "ratio_max/all"))
    )
    # Without lag the first step of a batch sees its own tokens, whose ratios are 1 whatever happens.
    ratios_can_move = all(measure(row, "lag/all") > 0 or measure(row, "optimizer_steps") > 1 for row in rows)
    figures = {"learning_rate": rate, "grad_norm": grad, "farthest_ratio": farthest}
    if grad == 0:
        why, advice = (
            "the gradient was 0 although answers had advantages",
            ("All of them may be clipped or masked (clip range, mismatch weights), or no parameter is trained"),
        )
    elif rate == 0:
        why, advice = "the learning rate was 0", "Set learner.learning_rate, or correct schedule.learning_rate"
    elif ratios_can_move and farthest < BOUNDS["no_effect"].value:
        why = f"the weights do not move: no answer's probability changed by more than {farthest:.1g} of itself"
        advice = f"Raise learner.learning_rate, which was {rate:.2g}"
    else:
        return None
    text = f"training has no effect: {why}"
    return LearningFinding(name="no_effect", since=rows[0]["batch"], text=text, advice=advice, figures=figures)


def same_tasks(rows: Sequence[Row], past: Past) -> LearningFinding | None:
    """The same tasks come again and again, or nearly all rest."""
    number, passes, groups = (measure(rows[-1], name) for name in ("num_tasks", "data_passes", "groups/all"))
    resting = measure(rows[-1], "num_resting_tasks")
    if resting >= 0.9 * number > 0:
        text = f"the data are exhausted: {resting:.0f} of {number:.0f} tasks rest, because they are always or never solved"
    elif 0 < number <= groups and passes >= 2:
        text = f"every batch has all {number:.0f} tasks again: they were drawn {passes:.0f} times each"
    elif passes >= BOUNDS["same_tasks"].value:
        text = f"each of the {number:.0f} tasks was drawn {passes:.0f} times"
    else:
        return None
    return LearningFinding(
        name="same_tasks",
        since=rows[-1]["batch"],
        text=text,
        advice="Add tasks (`gspo data add`), or end the run; rows that repeat each other count as one task",
        figures={"tasks": number, "passes": passes},
        is_wrong=False,
    )


RULES: Final[Mapping[FindingName, Judge]] = {
    "no_signal": no_signal, "cut_off": cut_off, "entropy": entropy, "length": length, "one_component": one_component,
    "held_out_falls": held_out_falls, "clipped": clipped, "mismatch": mismatch, "no_effect": no_effect,
    "same_tasks": same_tasks,
}  # fmt: skip
