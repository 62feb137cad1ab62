"""Group-relative advantages, per sequence or per turn, and their expansion to tokens.

Over the G *present* members of i's group:

    A_i = (r_i - b_i) / (std(r) + eps)           std: the sample deviation (divided by G - 1)
    b_i = mean(r)                                baseline "mean": GRPO (arXiv 2402.03300), GSPO (arXiv 2507.18071, eq. 6)
    b_i = mean of the other members' rewards     baseline "leave_one_out": RLOO (arXiv 2402.14740)

With ``std_over="batch"`` the deviation is that of all rewards given, about their own mean (Lite PPO, arXiv 2508.08221).

Groups may be partial (members dropped as stale, or unfinished). The consequences:

- "mean" contains r_i itself, which scales the expected gradient by (G - 1) / G: half for two members, 7/8 for eight.
  Full groups share the factor; partial ones count for less. "leave_one_out" is G / (G - 1) times as large and unbiased
  for any G >= 2, without division by the deviation (``normalise_std=False``; Dr. GRPO, arXiv 2503.20783, drops it too).
- Division by the deviation is biased: std(r) comes from few rewards, r_i among them. With two members the advantages are
  +-0.71 (leave_one_out: +-1.41), however small the difference; the error falls like 1 / G.
- No baseline repairs a group whose members are missing *because* they are long or hard: measure what is dropped.

A zero-advantage group has equal rewards or one member: its advantages are exactly 0 and it is flagged.
All arithmetic is float64, on the CPU; results are float32, on the device of the rewards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from gspo.inputs.units import segment_sum
from gspo.inputs.validation import require_ids, require_mask, require_vector
from gspo.settings import Baseline, StdOver, require_number

if TYPE_CHECKING:
    import numpy.typing as npt

TurnCredit = Literal["return_to_go", "per_turn", "role"]
"""What a turn is credited with: the discounted sum of its and all later rewards of its role, its own reward, or the sum of
all rewards of its role."""

STD_EPS = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of M trajectories, and which of them belong to a zero-advantage group."""

    advantages_M: Tensor
    zero_advantage_M: Tensor
    """bool: every reward of this trajectory's group is the same (or the group has one member)."""
    members_M: Tensor
    """int64: members of this trajectory's group that are present, itself included."""
    num_groups: int
    num_zero_advantage_groups: int
    num_single_groups: int
    """Groups of one member, which has nothing to be compared with. They also count as zero-advantage groups."""


@dataclass(frozen=True)
class TurnAdvantages:
    """Advantages of every turn of M trajectories (float32, one tensor each), and which groups have zero variance."""

    advantages: list[Tensor]
    zero_advantage_M: Tensor
    """bool: no turn of this trajectory's group has an advantage."""
    num_groups: int
    num_zero_advantage_groups: int


def group_advantages(
    rewards_M: Tensor | npt.ArrayLike,
    group_ids_M: Tensor | Iterable[Hashable],
    *,
    baseline: Baseline = "mean",
    normalise_std: bool = True,
    std_over: StdOver = "group",
    eps: float = STD_EPS,
) -> GroupAdvantages:
    """Return one advantage per trajectory; ``normalise_std=False`` only subtracts the baseline, ``std_over="batch"``
    divides by the deviation of all rewards instead of the group's.

    rewards_M: M numbers (torch, numpy or a list); the results are on the device of a tensor. group_ids_M: M integers or
    strings, in any order; groups may be partial.
    Raises: ValueError for a non-finite reward (a missing reward must not become 0: leave the trajectory out), another
    number of group ids, or an unknown baseline.
    """
    require_number("eps", eps, low=0.0)
    rewards = _rewards("rewards_M", rewards_M)
    groups = _groups(group_ids_M, rewards.shape[0])
    advantages, has_advantage = _normalise(
        rewards, groups, baseline=baseline, normalise_std=normalise_std, std_over=std_over, eps=eps
    )
    members = groups.bincount()
    num_groups = members.shape[0]
    alive = groups[has_advantage].unique()
    device = _device(rewards_M)
    return GroupAdvantages(
        advantages_M=advantages.float().to(device),
        zero_advantage_M=(~has_advantage).to(device),
        members_M=members[groups].to(device),
        num_groups=num_groups,
        num_zero_advantage_groups=num_groups - alive.shape[0],
        num_single_groups=int((members == 1).sum()),
    )


def turn_advantages(
    turn_rewards: Sequence[Tensor | npt.ArrayLike],
    group_ids_M: Tensor | Iterable[Hashable],
    *,
    turn_roles: Sequence[npt.ArrayLike] | None = None,
    credit: TurnCredit = "return_to_go",
    discount: float = 1.0,
    baseline: Baseline = "mean",
    normalise_std: bool = True,
    std_over: StdOver = "group",
    eps: float = STD_EPS,
) -> TurnAdvantages:
    """Return one advantage per turn, normalised over the turns of the same role and index in the group.

    A trajectory in which the policy plays several roles, such as both sides of a game, is as many trajectories, one of each
    role: rewards are added up within a role, turns are counted within it, and roles are compared with themselves alone. With
    ``credit="role"`` all turns of a role have the advantage of the sum of its rewards: for one role, that of
    ``group_advantages``.

    turn_rewards: for each of M trajectories the rewards of its turns (lengths differ); the results are on the device of the
    first. turn_roles: the role of each of these turns, whole numbers; None: there is one. An outcome reward belongs to the
    last turn. A turn that no other member of the group has reached has nothing to be compared with: advantage 0.
    The baseline uses the rewards of the same turn.
    Raises: ValueError as ``group_advantages``, for an unknown credit, for a discount outside [0, 1], and for roles that are
    not those of the turns.
    """
    require_number("eps", eps, low=0.0)
    require_number("discount", discount, low=0.0, high=1.0 + 1e-12)
    if credit not in get_args(TurnCredit):
        raise ValueError(f"credit is {credit!r}; choose one of {', '.join(get_args(TurnCredit))}")
    groups = _groups(group_ids_M, len(turn_rewards))
    given = [_rewards(f"turn_rewards[{i}]", values) for i, values in enumerate(turn_rewards)]
    lengths = [values.shape[0] for values in given]
    roles = _roles(turn_roles, lengths)
    # By trajectory and role: the turns, and what they are credited with: one value for each, or one for all of them.
    parts = [(i, role, torch.nonzero(of == role)[:, 0]) for i, of in enumerate(roles) for role in of.unique().tolist()]
    values = [_credited(given[i][turns], credit, discount) for i, _, turns in parts]
    sizes = torch.tensor([each.shape[0] for each in values], dtype=torch.int64)
    trajectory_of = torch.tensor([i for i, *_ in parts], dtype=torch.int64).repeat_interleave(sizes)
    role_of = torch.tensor([role for _, role, _ in parts], dtype=torch.int64).repeat_interleave(sizes)
    place_of = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(n) for n in sizes.tolist())])
    keys = torch.stack([groups[trajectory_of], role_of, place_of], dim=1)
    advantages, has_advantage = _normalise(
        torch.cat([torch.zeros(0, dtype=torch.float64), *values]), keys.unique(dim=0, return_inverse=True)[1],
        baseline=baseline, normalise_std=normalise_std, std_over=std_over, eps=eps,
    )  # fmt: skip
    by_turn = [torch.zeros(length, dtype=torch.float64) for length in lengths]
    for (i, _, turns), own in zip(parts, advantages.split(sizes.tolist()), strict=True):
        by_turn[i][turns] = own
    num_groups = int(groups.max()) + 1 if lengths else 0
    alive = groups[trajectory_of[has_advantage]].unique()
    device = _device(turn_rewards[0]) if lengths else None
    return TurnAdvantages(
        advantages=[each.float().to(device) for each in by_turn],
        zero_advantage_M=(~torch.isin(groups, alive)).to(device),
        num_groups=num_groups,
        num_zero_advantage_groups=num_groups - alive.shape[0],
    )


def sequence_values_to_tokens(values_S: Tensor, sequence_ids_T: Tensor, mask_T: Tensor) -> Tensor:
    """Give every action token the value of its sequence, every other token 0."""
    require_vector("values_S", values_S)
    require_mask("mask_T", mask_T)
    require_ids("sequence_ids_T", sequence_ids_T, values_S.shape[0], mask_T)
    if values_S.shape[0] == 0:
        return values_S.new_zeros(mask_T.shape[0])
    return torch.where(mask_T, values_S[torch.where(mask_T, sequence_ids_T, 0)], 0.0)


def turn_values_to_tokens(values: Sequence[Tensor], sequence_ids_T: Tensor, turn_ids_T: Tensor, mask_T: Tensor) -> Tensor:
    """Give every action token the value of its turn, every other token 0.

    values: for each sequence of the micro-batch one number per turn; turn ids count from 0 within a sequence.
    Raises: ValueError for an action token whose turn has no value.
    """
    require_mask("mask_T", mask_T)
    require_ids("sequence_ids_T", sequence_ids_T, len(values), mask_T)
    device = mask_T.device
    lengths_S = torch.tensor([len(turns) for turns in values], dtype=torch.int64, device=device)
    if int(lengths_S.sum()) == 0 and not bool(mask_T.any()):
        return torch.zeros(mask_T.shape[0], device=device)
    ids_T = torch.where(mask_T, sequence_ids_T, 0)
    missing = mask_T & ((turn_ids_T < 0) | (turn_ids_T >= lengths_S[ids_T]))
    if bool(missing.any()):
        index = int(torch.nonzero(missing)[0, 0])
        sequence = int(sequence_ids_T[index])
        raise ValueError(
            f"turn_ids_T[{index}] is {int(turn_ids_T[index])} but sequence {sequence} has values for "
            f"{int(lengths_S[sequence])} turns"
        )
    positions_T = torch.where(mask_T, (lengths_S.cumsum(0) - lengths_S)[ids_T] + turn_ids_T, 0)
    return torch.where(mask_T, torch.cat([turns.to(device) for turns in values])[positions_T], 0.0)


def _rewards(name: str, rewards: Tensor | npt.ArrayLike) -> Tensor:
    values = rewards.detach().cpu().double() if isinstance(rewards, Tensor) else torch.tensor(rewards, dtype=torch.float64)
    if values.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; give a flat vector")
    bad = torch.nonzero(~torch.isfinite(values))
    if bad.shape[0]:
        i = int(bad[0, 0])
        raise ValueError(
            f"{name}[{i}] is {values[i].item()}; a missing reward is not a reward of 0: drop the group or grade it again"
        )
    return values


def _device(rewards: Tensor | npt.ArrayLike) -> torch.device:
    return rewards.device if isinstance(rewards, Tensor) else torch.device("cpu")


def _groups(group_ids: Tensor | Iterable[Hashable], length: int) -> Tensor:
    """Renumber group ids to 0..groups-1, in the order in which they appear."""
    if isinstance(group_ids, Tensor) and group_ids.dim() != 1:
        raise ValueError(f"group_ids_M has shape {tuple(group_ids.shape)}; give a flat vector")
    members = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    # Tensors are equal by identity as keys: of a list of them each would be a group.
    ids: list[Hashable] = [each.item() if isinstance(each, Tensor) else each for each in members]
    if len(ids) != length:
        raise ValueError(f"group_ids_M has {len(ids)} elements; give one id for each of {length} trajectories")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in ids], dtype=torch.int64)


def _normalise(
    values: Tensor, groups: Tensor, *, baseline: Baseline, normalise_std: bool, std_over: StdOver, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ((value - baseline) / (std + eps), has an advantage) by group; exactly 0 for a group of equal values."""
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline is {baseline!r}; choose one of {', '.join(get_args(Baseline))}")
    if std_over not in get_args(StdOver):
        raise ValueError(f"std_over is {std_over!r}; choose one of {', '.join(get_args(StdOver))}")
    count = groups.bincount()
    num_groups = count.shape[0]
    others = (count - 1).clamp(min=1)
    mean = segment_sum(values, groups, num_groups) / count
    centred = values - mean[groups]
    std = (segment_sum(centred.square(), groups, num_groups) / others).sqrt()
    if std_over == "batch" and values.shape[0] > 1:
        std = values.std().expand(num_groups)
    if baseline == "leave_one_out":
        # r_i - (G mean - r_i) / (G - 1) = (r_i - mean) G / (G - 1)
        centred = centred * (count / others.double())[groups]
    highest = values.new_zeros(num_groups).scatter_reduce(0, groups, values, "amax", include_self=False)
    lowest = values.new_zeros(num_groups).scatter_reduce(0, groups, values, "amin", include_self=False)
    # Compared, not computed: equal rewards leave a rounding error of 1e-17, which a small eps would blow up.
    has_advantage = (highest > lowest)[groups]
    scaled = centred / (std[groups] + eps) if normalise_std else centred
    return torch.where(has_advantage, scaled, 0.0), has_advantage


def _roles(turn_roles: Sequence[npt.ArrayLike] | None, lengths: Sequence[int]) -> list[Tensor]:
    if turn_roles is None:
        return [torch.zeros(length, dtype=torch.int64) for length in lengths]
    roles = [torch.as_tensor(each, dtype=torch.int64) for each in turn_roles]
    if [tuple(each.shape) for each in roles] != [(length,) for length in lengths]:
        raise ValueError(
            f"turn_roles has {[tuple(each.shape) for each in roles]!s:.100} roles, turn_rewards {list(lengths)!s:.100} turns"
        )
    return roles


def _credited(rewards: Tensor, credit: TurnCredit, discount: float) -> Tensor:
    """Return what the turns of one role are credited with: a value for each, or one for all."""
    if credit == "role":
        return rewards.sum(dim=0, keepdim=True)
    return _return_to_go(rewards, discount) if credit == "return_to_go" else rewards


def _return_to_go(rewards: Tensor, discount: float) -> Tensor:
    returns = torch.zeros_like(rewards)
    following = 0.0
    for k in range(rewards.shape[0] - 1, -1, -1):
        following = float(rewards[k]) + discount * following
        returns[k] = following
    return returns
