"""Bugs in training, versions, checkpoints and the weights of engines."""

from tests.simulation.audit.schedules import ALIKE, RECORDED
from tests.simulation.bugs.planting import Bug
from tests.simulation.plan import STANDBY, Event


def _learner_dies_while_it_publishes() -> tuple[Event, ...]:
    """The learner dies as it publishes; at times the broker is down, too, and does not hear of it."""
    events: list[Event] = []
    for at in (1.0, 4.0, 8.0):
        events.append(Event(at=at, kind="kill_when", target=("broker",), seconds=1.0, point="publishing"))
        events.append(Event(at=at, kind="kill_when", target=("learner",), seconds=1.0, amount=0.1, point="publishing"))
    return tuple(events)


def _learner_dies_after_a_checkpoint() -> tuple[Event, ...]:
    """The learner dies just after a checkpoint that the broker, down at the time, has not heard of."""
    events: list[Event] = []
    for at in (1.0, 4.0, 8.0):
        events.append(Event(at=at, kind="kill_when", target=("broker",), seconds=4.0, point="publishing"))
        events.append(Event(at=at, kind="kill_when", target=("learner",), seconds=1.0, amount=1.6, point="saving"))
    return tuple(events)


def _the_newest_checkpoint_is_damaged() -> tuple[Event, ...]:
    return tuple(
        Event(at=at, kind="damage_checkpoint", target=("learner",), seconds=1.0, amount=amount)
        for at, amount in ((4.0, 0.3), (7.0, 0.6), (10.0, 0.45))
    )


def _a_learner_sleeps_until_its_successor_has_begun() -> tuple[Event, ...]:
    """A learner is cut off from the broker and sleeps; when it wakes up, another one has the run, and it trains on."""
    return (
        Event(at=0.5, kind="second_learner", target=(STANDBY,)),
        *(Event(at=at, kind="partition", target=("learner", "broker"), seconds=12.0) for at in (2.0, 18.0)),
        *(Event(at=at, kind="suspend", target=("learner",), seconds=7.0) for at in (2.5, 18.5)),
    )


TRAINING = (
    Bug(
        name="a lease is sampled as the schedule says now",
        module="gspo_services.broker.ledger.leases.leases",
        old="sampling=group.sampling,",
        new="sampling=state.next_sampling,",
        invariants=(ALIKE,),
        seed=3,
    ),
    Bug(
        name="a batch is trained at the settings' learning rate",
        module="gspo_services.learner.scheduled",
        old="values.learning_rate is None",
        new="True",
        invariants=(RECORDED,),
        seed=3,
    ),
    Bug(
        name="a batch that comes twice is trained twice",
        module="gspo_services.learner.broker.exchange",
        old="if self.wanted is not None and message.index == self.wanted.index:",
        new="if True:",
        invariants=("G2", "G6", "no process ends by itself"),
    ),
    Bug(
        name="a resumed learner starts one batch too late",
        module="gspo_services.learner.service",
        old="self._next_batch = self._saved_batch = state.batch_position",
        new="self._next_batch = self._saved_batch = state.batch_position + 1",
        invariants=("G2", "no peer"),
        seed=6,
    ),
    Bug(
        name="a version that the broker has not heard of is used again for other weights",
        module="gspo_services.learner.checkpoints.versions",
        old="self._newest = max(0 if note is None else note.newest, welcome.policy_version)",
        new="self._newest = welcome.policy_version",
        invariants=("one version, one content", "no process ends by itself"),
        weather=_learner_dies_while_it_publishes(),
        seed=1,
        is_deterministic=False,
    ),
    Bug(
        name="a version is served before its digest is noted",
        module="gspo_services.learner.checkpoints.versions",
        old="digest=digest)\n            self._write()\n",
        new="digest=digest)\n",
        invariants=("one version, one content",),
        weather=_learner_dies_while_it_publishes(),
        seed=1,
        is_deterministic=False,
    ),
    Bug(
        name="the same weights get a new number after a restart",
        module="gspo_services.learner.checkpoints.versions",
        old="if not known.digest or known.digest == digest:",
        new="if False:",
        invariants=("G3 nothing is dropped as stale",),
        is_deterministic=True,
    ),
    Bug(
        name="other weights keep the number after a restart",
        module="gspo_services.learner.checkpoints.versions",
        old="if not known.digest or known.digest == digest:",
        new="if True:",
        invariants=("one version, one content", "no peer"),
        seed=1,
        is_deterministic=False,
    ),
    Bug(
        name="a checkpoint's files are not verified",
        module="gspo_services.learner.checkpoints.digests",
        old="if digest != files[name]:",
        new="if False:",
        invariants=("G2 exactly once", "no process ends by itself", "one version, one content", "versions grow"),
        weather=_the_newest_checkpoint_is_damaged(),
        seed=7,
    ),
    Bug(
        name="an older checkpoint is not accepted",
        module="gspo_services.broker.ledger.training",
        old="if resume.next_batch < self._state.batches.checkpointed and self._session_has_checkpointed:",
        new="if resume.next_batch < self._state.batches.checkpointed:",
        invariants=("no peer",),
        weather=_the_newest_checkpoint_is_damaged(),
        seed=13,
    ),
    Bug(
        name="a learner publishes what it trains again",
        module="gspo_services.learner.service",
        old="if self._next_batch < self._newest_trained:\n            self._health.progress()\n            return",
        new="if False:\n            return",
        invariants=("no peer", "G3"),
        seed=2,
    ),
    Bug(
        name="a checkpoint covers a batch whose report may be lost",
        module="gspo_services.learner.service",
        old="may_publish=acknowledged, wait_s",
        new="may_publish=True, wait_s",
        invariants=("the ledger is whole",),
        weather=_learner_dies_after_a_checkpoint(),
        seed=5,
    ),
    Bug(
        name="loaded weights are not verified",
        module="gspo_services.rollout.weights.loader",
        old="        self.require(await self._verifier.verify(expected))\n",
        new="        await self._verifier.verify(expected)\n",
        invariants=("G4", "G5"),
        seed=6,
    ),
    Bug(
        name="a delta is applied without a check",
        module="gspo_services.rollout.weights.replica",
        old='    if found != digest:\n        raise ValueError(f"bucket at',
        new='    if False:\n        raise ValueError(f"bucket at',
        # The engine gets unchecked weights, so that either promise may be seen broken first.
        invariants=("G5 a replica is", "G4 only engines"),
        seed=98,
    ),
    Bug(
        name="a snapshot's digests are not checked",
        module="gspo_services.rollout.weights.replica",
        old="if digest != tensors[index].digest:",
        new="if False:",
        invariants=("G5 a replica is", "G4 only engines", "G5 only whole"),
        seed=6,
    ),
    Bug(
        name="a failed update counts as served",
        module="gspo_services.rollout.weights.sync",
        old="self.policy_version, self.quarantined = 0, error",
        new='self.policy_version, self.quarantined = version, ""',
        invariants=("G4", "G5", "liveness"),
        seed=4,
    ),
    Bug(
        name="a lease request names the announced version",
        module="gspo_services.rollout.service",
        old="version = self._sync.policy_version\n",
        new="version = self._sync._announced[0]\n",
        invariants=("G4",),
    ),
    Bug(
        name="all tokens of a piece get its last version",
        module="gspo_services.rollout.environment_loop",
        old="trajectory.act(piece)",
        new="trajectory.act(msgspec.structs.replace(piece, version_runs=["
        "msgspec.structs.replace(run, version=piece.version_runs[-1].version) for run in piece.version_runs]))",
        invariants=("G4",),
        seed=4,
    ),
    Bug(
        name="a second learner is welcomed while the first lives",
        module="gspo_services.broker.ledger.fencing",
        old="            self._require_silence(self.learner, sender, now)\n",
        new="",
        invariants=("one learner",),
        weather=(Event(at=3.0, kind="second_learner", target=(STANDBY,)),),
    ),
    Bug(
        name="a learner's message does not count as a sign of life",
        module="gspo_services.broker.ledger.fencing",
        old="        if peer.key == self.learner:\n            self._learner_heard_s = self._listened_s",
        new="        if peer.key == self.learner:\n            pass",
        invariants=("one learner",),
        weather=(Event(at=6.0, kind="second_learner", target=(STANDBY,)),),
    ),
    Bug(
        name="a learner that was cut off and its successor give one version to two weights",
        module="gspo_services.learner.checkpoints.versions",
        old="if note is not None and note.learner != self._learner:",
        new="if False:",
        invariants=("one version, one content", "G2 exactly once"),
        weather=_a_learner_sleeps_until_its_successor_has_begun(),
        seed=9,
        is_deterministic=False,
    ),
)
