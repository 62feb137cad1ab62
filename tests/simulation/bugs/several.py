"""Bugs that only several brokers can show."""

from tests.simulation.audit.learners import BROKER_0_FIRST
from tests.simulation.brokers.lines import LINES
from tests.simulation.brokers.sharing import FIRST_EVALUATES, KNOWN, ONE_GIVER, OWN_TASKS, OWN_WORK
from tests.simulation.brokers.whole import WHOLE
from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import STANDBY, Event, Point


def _die_between(point: Point, *names: str) -> tuple[Event, ...]:
    """These processes die when the first broker has something, and the others do not have it yet."""
    moments = (1.0, 2.0, 3.0, 5.0, 8.0, 11.0)
    return tuple(
        Event(at=at, kind="kill_when", target=(name,), seconds=1.0, amount=0.0, point=point)
        for at in moments
        for name in names
    )


def _two_learners() -> tuple[Event, ...]:
    """A second learner waits while the first is cut off from one broker, and then from the other."""
    return (
        Event(at=0.0, kind="second_learner", target=(STANDBY,)),
        Event(at=1.0, kind="partition", target=("learner", "broker-1"), seconds=10.0),
        Event(at=14.0, kind="partition", target=("learner", "broker"), seconds=10.0),
    )


SEVERAL = (
    Bug(
        name="two brokers give the same ids",
        module="gspo_services.broker.ledger.group_states",
        old="        step = self._share.num_brokers\n",
        new="        step = 1\n",
        invariants=(ONE_GIVER,),
        num_brokers=2,
    ),
    Bug(
        name="every broker samples every task",
        module="gspo_services.broker.ledger.sampling.share",
        old="        return range(self.first_from(tasks[0]), tasks[-1] + 1, self.num_brokers)",
        new="        return tasks",
        invariants=(OWN_TASKS, "sampling: a prompt has the next task"),
        num_brokers=2,
    ),
    Bug(
        name="every broker evaluates",
        module="gspo_services.broker.entry",
        old="    return settings.broker.number == 0",
        new="    return True",
        invariants=(FIRST_EVALUATES,),
        seed=1,
        num_brokers=2,
    ),
    Bug(
        name="a chunk goes to the wrong broker",
        module="gspo_services.rollout.several.connections",
        old="return trajectory_id % len(self.clients)",
        new="return trajectory_id // 2 % len(self.clients)",
        invariants=(OWN_WORK,),
        num_brokers=2,
    ),
    Bug(
        name="a rollout moves to a version that not all brokers know",
        module="gspo_services.rollout.several.versions",
        old="frozenset.intersection(",
        new="frozenset.union(",
        invariants=(KNOWN, "honest peers are not limited", "G4"),
        weather=_die_between("publication received", "broker-1"),
        num_brokers=2,
        seed=11,
    ),
    Bug(
        name="a batch is trained when all shares but one have come",
        module="gspo_services.learner.several.merged_batch",
        old="        if any(self.waits_for(broker) for broker in range(len(self._answers))):\n",
        new="        if any(self.waits_for(broker) for broker in range(len(self._answers) - 1)):\n",
        invariants=(WHOLE,),
        seed=1,
        num_brokers=2,
    ),
    Bug(
        name="a share that was quarantined is reported as trained",
        module="gspo_services.learner.several.merged_batch",
        old="skipped=isinstance(answer, SkipBatch))",
        new="skipped=False)",
        invariants=("no peer",),
        weather=(Event(at=0.0, kind="poison", target=("unreadable", "broker-1"), amount=0.0),),
        num_brokers=2,
    ),
    Bug(
        name="each broker's line of metrics is that of its share",
        module="gspo_services.learner.several.merged_batch",
        old="metrics={**trained.metrics, **self._whole.batch.report}",
        new="metrics={**trained.metrics}",
        invariants=(LINES,),
        num_brokers=2,
    ),
    Bug(
        name="a share's parts are numbered as if it were alone",
        module="gspo_services.learner.several.shares",
        old="    return PartArrived(part=replace(arrived.part, part=first + arrived.part.part), arrays=arrived.arrays)",
        new="    return arrived",
        invariants=("no process ends by itself", "no error is lost", "poison"),
        num_brokers=2,
    ),
    Bug(
        name="a learner asks every broker at once, and two learners have some each",
        module="gspo_services.learner.several.connections",
        old="                await self._connections[0].welcome()\n",
        new="",
        invariants=(BROKER_0_FIRST,),
        weather=_two_learners(),
        num_brokers=2,
    ),
    Bug(
        name="a stop at one broker does not reach the others",
        module="gspo_services.learner.several.connections",
        old="        if self._batch.end is not None and self._batch.index < self._num_batches:\n",
        new="        if False:\n",
        invariants=("liveness",),
        weather=(Event(at=3.0, kind="stop", target=("broker-1",)),),
        num_brokers=2,
    ),
    Bug(
        name="a report goes to broker 0 alone",
        module="gspo_services.learner.broker.connection",
        old="            await self._client.send(message)\n            with_this",
        new="            if not self.number:\n                await self._client.send(message)\n            with_this",
        invariants=("the ledger is whole", "no peer", "liveness", "no process ends by itself", "G1"),
        num_brokers=2,
    ),
)
