"""Bugs in dynamic sampling."""

from tests.simulation.audit.sampling import AWAKE, BOUNDED, COUNTED, RESTS, SIFTED, ZERO_ADVANTAGE
from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import Event


def _the_broker_dies_often() -> tuple[Event, ...]:
    return tuple(Event(at=at, kind="kill", target=("broker",), seconds=0.2) for at in (2.0, 4.0, 6.0, 8.0, 11.0, 14.0))


SAMPLING = (
    Bug(
        name="a group that could teach something is filtered out",
        module="gspo_services.broker.ledger.sampling.zero_advantage",
        old="return not has_equal_rewards(members, by_turn=rules.by_turn)",
        new="return not has_equal_rewards(members[1:], by_turn=rules.by_turn)",
        invariants=(ZERO_ADVANTAGE,),
    ),
    Bug(
        name="a batch filters out groups without end",
        module="gspo_services.broker.ledger.state",
        old="if self.run.filtered_groups >= rules.max_filtered or may_teach:",
        new="if not rules.max_filtered or may_teach:",
        invariants=(BOUNDED, "liveness"),
    ),
    Bug(
        name="a broker that starts again forgets what the batch has filtered out",
        module="gspo_services.broker.store.reader",
        old="return RunRow() if found is None else msgspec.json.decode(found, type=RunRow)",
        new="return RunRow() if found is None else msgspec.structs.replace(msgspec.json.decode(found, type=RunRow), "
        "filtered_groups=0)",
        invariants=(COUNTED, BOUNDED, "the ledger is whole", "restore"),
    ),
    Bug(
        name="what is filtered out is not counted",
        module="gspo_services.broker.ledger.training",
        old="        counted = state.change_run(filtered_groups=0, filtered_tokens=0)\n",
        new="        counted: list[Action] = []\n",
        invariants=(COUNTED, BOUNDED, SIFTED),
    ),
    Bug(
        name="a zero-advantage group takes its place in the batch",
        module="gspo_services.broker.ledger.leases.holders",
        old="*state.sift(row.group_id)]",
        new="*(state.sift(row.group_id) if row.trajectory_id % 3 else [])]",
        invariants=(SIFTED,),
        seed=65,
    ),
    Bug(
        name="a task that rests is sampled",
        module="gspo_services.broker.ledger.state",
        old="            if until <= batch:\n                break\n",
        new="            break\n",
        invariants=(AWAKE,),
        seed=41,
    ),
    Bug(
        name="a broker that starts again forgets which tasks rest",
        module="gspo_services.broker.store.reader",
        old='tasks=tuple(self.rows(TaskRow, "ORDER BY task_index")),',
        new="tasks=(),",
        invariants=(AWAKE, RESTS),
        weather=_the_broker_dies_often(),
        seed=89,
    ),
    Bug(
        name="a task rests one group too late",
        module="gspo_services.broker.ledger.sampling.rests",
        old="if num_zero_advantage >= self._after_groups:",
        new="if num_zero_advantage > self._after_groups:",
        invariants=(RESTS,),
        seed=2,
    ),
)
