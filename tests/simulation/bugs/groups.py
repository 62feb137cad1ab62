"""Bugs in rewards of whole groups."""

from tests.simulation.audit.books import COMPARED
from tests.simulation.bugs.planting import Bug

GROUPS = (
    Bug(
        name="the rewards of a group are lost",
        module="gspo_services.broker.ledger.leases.holders",
        old="return [*saves(self._state.groups.grade(graded, row.group_id)), *self._after_end(row)]",
        new="return [Save(row=self._state.groups.release(row.trajectory_id, failed=False))]",
        invariants=("liveness",),
        compares=True,
    ),
    Bug(
        name="the rewards of a group are given to the wrong members",
        module="gspo_services.broker.ledger.group_states",
        old="zip(self.members(group_id), graded.rewards, graded.components, strict=True)",
        new="zip(self.members(group_id), graded.rewards[::-1], graded.components, strict=True)",
        invariants=(COMPARED,),
        compares=True,
    ),
    Bug(
        name="what an answer is worth alone stays with its first turns",
        module="gspo_services.broker.ledger.group_states",
        old="rewards = [0.0] * row.num_turns",
        new="rewards = list(row.turn_rewards)",
        invariants=(COMPARED,),
        compares=True,
    ),
    Bug(
        name="a group is complete without being graded",
        module="gspo_services.broker.ledger.group_states",
        old="        if grades:\n            others",
        new="        if grades and row.trajectory_id % 3:\n            others",
        invariants=(COMPARED, "G2 exactly once"),
        compares=True,
    ),
    Bug(
        name="the first turn of an episode is compared",
        module="gspo_services.broker.outgoing",
        old="_of_turn(payload, row.last_turn)",
        new="_of_turn(payload, 0)",
        invariants=(COMPARED,),
        compares=True,
    ),
    Bug(
        name="components of an answer alone are forgotten",
        module="gspo_services.rollout.group_rewards",
        old="components = {**member.components, **result.components}",
        new="components = {**result.components}",
        invariants=(COMPARED,),
        seed=1,
        compares=True,
    ),
)
