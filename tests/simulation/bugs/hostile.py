"""Bugs in how the broker meets peers that lie."""

from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import Event


def _engines_lie() -> tuple[Event, ...]:
    """Engines report tokens that no such model can have made."""
    return tuple(Event(at=at, kind="engine_lies", target=("rollout-0",), amount=3.0) for at in (2.0, 5.0, 8.0, 11.0))


A_HOSTILE_PEER = tuple(Event(at=at, kind="hostile") for at in (2.0, 10.0))
"""A peer that the broker admits breaks every rule."""

HOSTILE = (
    Bug(
        name="a session's role is not compared",
        module="gspo_services.broker.ledger.fencing",
        old="if role != bound:",
        new="if False:",
        invariants=("a session keeps its role",),
        weather=A_HOSTILE_PEER,
    ),
    Bug(
        name="an operator's Goodbye ends the rollout of its name",
        module="gspo_services.broker.ledger.ledger",
        old='"gone", reason) if peer.role == "rollout" else []',
        new='"gone", reason)',
        invariants=("a session ends only itself",),
        weather=A_HOSTILE_PEER,
    ),
    Bug(
        name="a quota is never forgiven",
        module="gspo_services.broker.quotas.quotas",
        old="self.level - passed * quota.forgiven_per_s",
        new="self.level",
        invariants=("honest peers are not limited", "liveness"),
        seed=2,
    ),
    Bug(
        name="nothing is held against a peer",
        module="gspo_services.broker.quotas.quotas",
        old="level.level += number",
        new="level.level += 0",
        invariants=("a liar is limited",),
        weather=A_HOSTILE_PEER,
        seed=1,
    ),
    Bug(
        name="a token older than its lease is taken",
        module="gspo_services.broker.ledger.intake",
        old="if version < oldest:",
        new="if False:",
        invariants=("G4 an engine's versions do not go back",),
        weather=A_HOSTILE_PEER,
        seed=4,
    ),
    Bug(
        name="operators have no places of their own",
        module="gspo_services.broker.ledger.fencing",
        old="makes_room(self.of_role(role), self._taken[role], places, owner.key, now)",
        new="makes_room(self.of_role('rollout'), self._taken['rollout'], self._places['rollout'], owner.key, now)",
        invariants=("an operator always gets in",),
        weather=A_HOSTILE_PEER,
    ),
    Bug(
        name="a token outside the vocabulary is taken",
        module="gspo_services.broker.ledger.intake",
        old="if facts.largest_token_id >= newest.vocabulary:",
        new="if False:",
        invariants=("poison: a healthy batch", "no process ends by itself", "no error"),
        weather=_engines_lie(),
    ),
    Bug(
        name="what a rollout makes of an absurd reward does not go through the door",
        module="gspo_services.rollout.environment_loop",
        old="await through_the_door(self._run(lease, trajectory), self._refused, (EpisodeFailed, EngineError))",
        new="await self._run(lease, trajectory)",
        invariants=("no process ends by itself", "no error", "no peer"),
        weather=tuple(Event(at=at, kind="rewards_fail", seconds=8.0, amount=0.5) for at in (0.5, 10.0)),
        seed=1,
    ),
)
