"""The required behaviour around the loss: anchors and mismatch, lag, advantages, statistics, controller, refusals.

Functions of the implementation and a random step, as in ``properties``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, stdev

import torch

from tests.support.loss.gspo_copies import Gspo
from tests.support.loss.loss_cases import EPS_HIGH, EPS_LOW, Flat, Step, one_sequence, pack
from tests.unit.gspo.conformance.properties import F64, UNITS, agrees, all_close, close, objective_loss, proximal_of

CAP = 1.1


def the_mismatch_is_counted_once(gspo: Gspo, step: Step) -> None:
    """The behaviour anchor counts it in the ratio and the clip range, the proximal anchor only in the sequence weight."""
    settings, narrow = gspo.settings, step
    for unit in UNITS:
        # Token ratios need a wider clip, and log-ratios that reach it.
        eps = {"eps_low": 0.2, "eps_high": 0.27} if unit == "token" else {}
        step = narrow.stretched(200.0) if unit == "token" else narrow
        plain = step.with_sequences([replace(s, weight=1.0) for s in step.sequences])
        flat = pack(step.sequences, F64)
        objective = settings.Objective(
            ratio_unit=unit, clip_calibration="off", clip_range_growth=step.clip_range_growth, noise_z=2.0, **eps
        )
        output = objective_loss(gspo, objective, step, flat, sigma=step.noise / 2, clip_scale=step.scale)
        agrees(flat, output, plain.reference(unit, **eps), f"behaviour anchor, unit {unit}")
        assert output.stats.weight_S.tolist() == [1.0] * len(step.sequences)
        for mode in ("off", "truncate", "reject"):
            weights = [_weight(mode, _mean_mismatch(step, i)) for i in range(len(step.sequences))]
            proximal = step.with_sequences(
                [
                    replace(s, anchor_logprobs=anchor, logprobs=_shifted(s.logprobs, s.anchor_logprobs, anchor), weight=w)
                    for s, anchor, w in zip(step.sequences, step.proximal, weights, strict=True)
                ]
            )
            moved = replace(pack(proximal.sequences, F64), anchor_T=flat.anchor_T)
            objective = settings.Objective(
                ratio_unit=unit,
                anchor="proximal",
                tis_mode=mode,
                tis_cap=CAP,
                clip_range_growth=9.0,
                noise_z=9.0,
                **eps,
            )
            proximal_T = proximal_of(step, moved)
            output = objective_loss(
                gspo, objective, step, moved, sigma=1.0, clip_scale=step.scale, proximal_logprobs_T=proximal_T
            )
            expected = proximal.reference(unit, clip_range_growth=0.0, noise=0.0, **eps)
            agrees(moved, output, expected, f"proximal anchor, {mode}, unit {unit}")
            all_close(output.stats.weight_S, torch.tensor(weights, dtype=F64), 1e-12, "weights")


def _shifted(logprobs: list[float], old: list[float], new: list[float]) -> list[float]:
    """Return the same log-ratios over another anchor."""
    return [n + p - o for p, o, n in zip(logprobs, old, new, strict=True)]


def _mismatch(step: Step, i: int) -> list[float]:
    s = step.sequences[i]
    return [p - mu for p, mu, m in zip(step.proximal[i], s.anchor_logprobs, s.mask, strict=True) if m]


def _mean_mismatch(step: Step, i: int) -> float:
    return fmean(_mismatch(step, i) or [0.0])


def _weight(mode: str, mean: float) -> float:
    if mode == "truncate":
        return min(math.exp(mean), CAP)
    if mode == "reject" and not 1 / CAP <= math.exp(mean) <= CAP:
        return 0.0
    return 1.0 if mode == "off" else math.exp(mean)


def rejection_changes_neither_n_nor_N(gspo: Gspo, step: Step) -> None:
    """The gradients of the kept sequences keep their bits; the rejected one gets none and is still counted."""
    lengths = [len(s.mask) for s in step.sequences]
    kept = step.with_sequences([replace(s, weight=1.0) for s in step.sequences])
    rejected = step.with_sequences([replace(s, weight=0.0 if i == 0 else 1.0) for i, s in enumerate(step.sequences)])
    for unit in UNITS:
        whole, less = pack(kept.sequences, F64), pack(rejected.sequences, F64)
        whole_output, output = step.loss(whole, unit, gspo), step.loss(less, unit, gspo)
        before, after = whole.gradient(whole_output).split(lengths), less.gradient(output).split(lengths)
        assert after[0].abs().sum().item() == 0.0
        for i in range(1, len(lengths)):
            assert torch.equal(before[i], after[i]), f"unit {unit}: rejecting sequence 0 changed sequence {i}"
        assert torch.equal(output.stats.num_tokens_S, whole_output.stats.num_tokens_S)
        assert output.stats.rejected_S.tolist() == [i == 0 for i in range(len(lengths))]


def tokens_left_out_after_sampling_count_in_n(gspo: Gspo, step: Step) -> None:
    """With token ratios, the remaining tokens keep their gradients to the bit if n_i is given."""
    flat = replace(pack(step.sequences, F64), weights_S=torch.ones(len(step.sequences), dtype=F64))
    counts_S = torch.tensor([float(sum(s.mask)) for s in step.sequences], dtype=F64)
    stays_T = torch.arange(flat.mask_T.shape[0]) % 2 == 0

    def gradient(mask_T: torch.Tensor) -> torch.Tensor:
        clip_range = gspo.staleness.clip_range(flat.lag_S, eps_low=EPS_LOW, eps_high=EPS_HIGH)
        arguments = (flat.logprobs_T, flat.anchor_T, flat.advantages_T, mask_T, flat.sequence_ids_T)
        output = gspo.loss.gspo_loss(
            *arguments,
            num_sequences=step.num_sequences,
            clip_range=clip_range,
            ratio_unit="token",
            tokens_per_sequence_S=counts_S,
        )
        return flat.gradient(output)

    expected_T = gradient(flat.mask_T) * stays_T
    assert torch.equal(gradient(flat.mask_T & stays_T), expected_T)


def the_lag_is_the_mean_over_action_tokens(gspo: Gspo, step: Step) -> None:
    flat = pack(step.sequences)
    versions_T = torch.tensor([v for row in step.versions for v in row], dtype=torch.int64)
    versions_T = torch.where(flat.mask_T, versions_T, versions_T.clamp(max=step.policy_version))
    arguments = (step.policy_version, versions_T, flat.mask_T, flat.sequence_ids_T, len(step.sequences))
    lag_S = gspo.staleness.sequence_lag(*arguments)
    all_close(lag_S, torch.tensor([s.lag for s in step.sequences]), 1e-6, "lag")


def advantages_are_relative_to_the_members_present(gspo: Gspo, step: Step) -> None:
    members: dict[int, list[float]] = {}
    for group, reward in zip(step.groups, step.rewards, strict=True):
        members.setdefault(group, []).append(reward)
    for baseline in ("mean", "leave_one_out"):
        for normalise_std in (True, False):
            result = gspo.advantages.group_advantages(
                step.rewards, step.groups, baseline=baseline, normalise_std=normalise_std, eps=0.0
            )
            for i, (group, reward) in enumerate(zip(step.groups, step.rewards, strict=True)):
                rewards = members[group]
                assert result.members_M[i].item() == len(rewards)
                silent = max(rewards) == min(rewards)
                assert result.zero_advantage_M[i].item() == silent
                if silent:
                    assert result.advantages_M[i].item() == 0.0
                    continue
                others = rewards.copy()
                others.remove(reward)
                expected = reward - fmean(rewards if baseline == "mean" else others)
                expected /= stdev(rewards) if normalise_std else 1.0
                close(result.advantages_M[i].item(), expected, 1e-6, f"advantage of {i}, {baseline}")


def advantages_depend_on_neither_offset_nor_scale_of_the_rewards(gspo: Gspo, step: Step) -> None:
    """Rewards in other units, or around another level, rank the members alike: no difference is too small to count."""
    for normalise_std in (True, False):
        expected = gspo.advantages.group_advantages(step.rewards, step.groups, normalise_std=normalise_std, eps=0.0)
        for scale, offset in ((2.0**-20, 0.0), (2.0**20, 0.0), (1.0, 2.0**20), (2.0**-10, 2.0**10)):
            rewards = [scale * reward + offset for reward in step.rewards]
            for given in (rewards, torch.tensor(rewards, dtype=F64)):
                moved = gspo.advantages.group_advantages(given, step.groups, normalise_std=normalise_std, eps=0.0)
                advantages_M = moved.advantages_M if normalise_std else moved.advantages_M.double() / scale
                all_close(advantages_M, expected.advantages_M, 1e-6, f"advantages at {scale} r + {offset}")
                assert torch.equal(moved.zero_advantage_M, expected.zero_advantage_M)


def the_deviation_has_one_millionth_added(gspo: Gspo, step: Step) -> None:
    """That is the formula's eps; where rewards differ by a thousandth, a larger one would shrink the advantages."""
    for scale in (1.0, 1e-3, 1e-6):
        rewards = [scale * reward for reward in step.rewards]
        exact = gspo.advantages.group_advantages(rewards, step.groups, eps=0.0).advantages_M
        result = gspo.advantages.group_advantages(rewards, step.groups)
        turns = gspo.advantages.turn_advantages([[reward] for reward in rewards], step.groups)
        for i, group in enumerate(step.groups):
            members = [reward for reward, other in zip(rewards, step.groups, strict=True) if other == group]
            deviation = stdev(members) if len(members) > 1 else 0.0
            expected = exact[i].item() * deviation / (deviation + 1e-6)
            close(result.advantages_M[i].item(), expected, 1e-6, f"advantage of {i} at scale {scale}")
            close(turns.advantages[i].item(), expected, 1e-6, f"advantage of the turn of {i} at scale {scale}")


def moments_are_those_of_fresh_action_tokens(gspo: Gspo, step: Step) -> None:
    flat = pack(step.sequences)
    versions_T = torch.tensor([v for row in step.versions for v in row], dtype=torch.int64)
    learner_T = proximal_of(step, flat)
    moments = gspo.mismatch.mismatch_moments(learner_T, flat.anchor_T, flat.mask_T, versions_T, step.policy_version)
    fresh = []
    for i, row in enumerate(step.versions):
        of_actions = [version for version, m in zip(row, step.sequences[i].mask, strict=True) if m]
        fresh += [x for x, version in zip(_mismatch(step, i), of_actions, strict=True) if version == step.policy_version]
    assert moments.count == len(fresh)
    mean = fmean(fresh) if fresh else 0.0
    close(moments.variance * 1e3, 1e3 * fmean([(x - mean) ** 2 for x in fresh] or [0.0]), 1e-4, "1000 x variance")


def the_mismatch_kl_is_k3(gspo: Gspo, step: Step) -> None:
    """It is the mean of r - 1 - log r over the action tokens, r = learner / engine."""
    flat = pack(step.sequences, F64)
    arguments = (proximal_of(step, flat), flat.anchor_T, flat.mask_T, flat.sequence_ids_T, len(step.sequences))
    expected = [fmean([math.exp(x) - 1 - x for x in _mismatch(step, i)] or [0.0]) for i in range(len(step.sequences))]
    all_close(gspo.mismatch.mismatch_kl(*arguments) * 1e3, 1e3 * torch.tensor(expected, dtype=F64), 1e-9, "1000 x KL")


def summaries_are_over_sequences_by_sign_and_lag(gspo: Gspo, step: Step) -> None:
    flat = pack(step.sequences, F64)
    output = step.loss(flat, "sequence", gspo)
    summary = gspo.diagnostics.summarise(output.stats)
    rows = []
    for s, clipped in zip(step.sequences, step.reference("sequence").clipped, strict=True):
        actions = [t for t, m in enumerate(s.mask) if m]
        if actions:
            share = sum(clipped[t] != 0 for t in actions) / len(actions)
            ratio = math.exp(fmean(s.logprobs[t] - s.anchor_logprobs[t] for t in actions))
            rows.append((fmean(s.advantages[t] for t in actions), s.lag, share, ratio * s.weight))
    chosen = {
        "all": rows,
        "lag_0": [row for row in rows if row[1] == 0],
        "advantage_positive": [row for row in rows if row[0] > 0],
        "advantage_negative": [row for row in rows if row[0] < 0],
    }
    for name, members in chosen.items():
        assert summary[f"sequences/{name}"] == len(members), name
        if members:
            close(summary[f"clip_fraction/{name}"], fmean(row[2] for row in members), 1e-9, f"clip fraction of {name}")
            weights = [row[3] for row in members]
            squares = sum(w * w for w in weights)
            expected = sum(weights) ** 2 / squares / len(weights) if squares else 0.0
            close(summary[f"effective_sample_size/{name}"], expected, 1e-9, f"effective sample size of {name}")


def more_clipping_than_wanted_widens_the_clip_range(gspo: Gspo, step: Step) -> None:
    clip = gspo.adaptive.AdaptiveClip(target=0.2, rate=0.5)
    clip.update(0.3)
    close(clip.scale, math.exp(0.25), 1e-12, "scale above the target")
    clip.update(0.0)
    close(clip.scale, math.exp(-0.25), 1e-12, "scale below the target")


def refuses(message: str, call: Callable[[], object]) -> None:
    """Expect a ValueError with a text that begins with ``message``. Raises: AssertionError otherwise."""
    try:
        call()
    except ValueError as error:
        assert str(error).startswith(message), f"{error!r} does not begin with {message!r}"
        return
    raise AssertionError(f"accepted, instead of: {message}")


def bad_arguments_are_named(gspo: Gspo, step: Step) -> None:
    """Errors name the argument, the index and the value; half precision is one of the cases."""
    good = pack([one_sequence([0.0, 0.0], 1.0), one_sequence([0.0], 1.0)])
    nan, inf = math.nan, math.inf

    def with_column(name: str, *values: object) -> Flat:
        return replace(good, **{name: torch.tensor(values)})

    cases = {
        "logprobs_T is torch.bfloat16": replace(good, logprobs_T=good.logprobs_T.detach().bfloat16()),
        "logprobs_T is torch.float16": replace(good, logprobs_T=good.logprobs_T.detach().half()),
        "anchor_logprobs_T is torch.bfloat16": replace(good, anchor_T=good.anchor_T.bfloat16()),
        "logprobs_T[1] is nan": with_column("logprobs_T", 0.0, nan, 0.0),
        "anchor_logprobs_T[2] is -inf": with_column("anchor_T", 0.0, 0.0, -inf),
        "advantages_T[0] is nan": with_column("advantages_T", nan, 0.0, 0.0),
        "advantages_T has 2 elements where 3 are needed": with_column("advantages_T", 0.0, 0.0),
        "mask_T has 4 elements where 3 are needed": with_column("mask_T", True, True, True, True),
        "mask_T is torch.int64": with_column("mask_T", 1, 1, 1),
        "sequence_ids_T[2] is 2; ids lie in [0, 2)": with_column("sequence_ids_T", 0, 0, 2),
        "sequence_ids_T[0] is -1": with_column("sequence_ids_T", -1, 0, 1),
        "turn_ids_T[1] is -2": with_column("turn_ids_T", 0, -2, 0),
        "turn_ids_T has 1 elements where 3 are needed": with_column("turn_ids_T", 0),
        "lag_S[1] is -1.0": with_column("lag_S", 0.0, -1.0),
        "lag_S[0] is nan": with_column("lag_S", nan, 0.0),
        "mismatch_weights_S[1] is -0.5": with_column("weights_S", 1.0, -0.5),
        "mismatch_weights_S[0] is nan": with_column("weights_S", nan, 1.0),
        "advantages_T[1] is inf": with_column("advantages_T", 0.0, inf, 0.0),
        "sequence_ids_T is torch.float32": with_column("sequence_ids_T", 0.0, 0.0, 1.0),
        "logprobs_T has shape (1, 3)": replace(good, logprobs_T=good.logprobs_T.detach()[None]),
    }
    for message, flat in cases.items():
        refuses(message, lambda flat=flat: flat.loss(2, ratio_unit="turn", gspo=gspo))
    refuses("num_sequences is 1 but this micro-batch alone has 2 sequences", lambda: good.loss(1, gspo=gspo))
    refuses("log_ratio_clamp is 0.0", lambda: good.loss(2, log_ratio_clamp=0.0, gspo=gspo))
    refuses(
        "versions_T[1] is 3 but policy_version is 2",
        lambda: gspo.staleness.sequence_lag(2, torch.tensor([2, 3, 1]), good.mask_T, good.sequence_ids_T, 2),
    )
    refuses("rewards_M[1] is nan", lambda: gspo.advantages.group_advantages([1.0, nan], [0, 0]))
