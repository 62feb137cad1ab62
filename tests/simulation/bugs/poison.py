"""Bugs in how a batch is treated that ends its learner."""

from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import Event, Poison


def _poison(kind: Poison, *more: Event) -> tuple[Event, ...]:
    """The first batch is poison, and ``more``."""
    return (Event(at=0.0, kind="poison", target=(kind,), amount=0.0), *more)


POISON = (
    Bug(
        name="how often a batch failed is forgotten with the broker's memory",
        module="gspo_services.broker.store.reader",
        old='failures=tuple(self.rows(FailureRow, "WHERE batch >= ? ORDER BY batch", (checkpointed,))),',
        new="failures=(),",
        invariants=("poison", "liveness"),
        weather=_poison(
            "raises", Event(at=0.0, kind="kill_when", target=("broker",), seconds=1.0, amount=0.2, point="batch failed")
        ),
    ),
    Bug(
        name="a batch is quarantined without a reason",
        module="gspo_services.broker.ledger.quarantine.quarantine",
        old="reason=reason[:MAX_TEXT])",
        new='reason="")',
        invariants=("poison",),
        weather=_poison("raises"),
    ),
    Bug(
        name="a batch that was quarantined is delivered",
        module="gspo_services.broker.ledger.training",
        old="        if reason:\n            skip = Reply(",
        new="        if False:\n            skip = Reply(",
        invariants=("poison",),
        weather=_poison("raises"),
    ),
    Bug(
        name="a batch is quarantined when its learner was killed once",
        module="gspo_services.broker.ledger.quarantine.failures",
        old="row.reported + row.silent < SILENT_MOST",
        new="row.reported + row.silent < 1",
        invariants=("poison",),
        weather=(Event(at=1.0, kind="kill_when", target=("learner",), seconds=1.0, amount=0.2, point="batch sent"),),
    ),
    Bug(
        name="ends without a word are not counted",
        module="gspo_services.broker.ledger.training",
        old="        rows = state.failures.ended_silently(index)\n        note",
        new="        rows = []\n        note",
        invariants=("liveness",),
        weather=_poison("dies"),
    ),
    Bug(
        name="a prompt that is sampled again loses its place",
        module="gspo_services.broker.ledger.state",
        old="                    former.prompt,\n",
        new="                    former.prompt + 1,\n",
        invariants=("G2 no prompt",),
        weather=_poison("raises", *(Event(at=at, kind="requeue") for at in (8.0, 14.0, 20.0))),
        seed=3,
    ),
)
