"""A learner dies between any two messages to several brokers, and the next one brings all their ledgers to the same end.

The ledgers, the lines and the numbers of versions are the real ones; the training loop is played in the order in which the
learner's service says things.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_protocol.messages import (
    SEQUENCED,
    Checkpointed,
    EndOfRun,
    Message,
    Published,
    Refused,
    Resume,
    Trained,
    Welcome,
)
from gspo_services.broker.ledger.actions import Action, DeliverBatch, Reply, SessionKey
from gspo_services.learner.broker.connection import BrokerConnection
from gspo_services.learner.checkpoints.versions import Versions
from gspo_services.learner.several.merged_welcome import merged_welcome
from gspo_services.runs.audit.findings import Findings, Rules
from gspo_services.runs.audit.order import audit_batches, audit_versions, read_order
from tests.support.broker.ledger import LedgerHarness, config_with
from tests.support.broker.ledger_training import R1
from tests.support.broker.peers import VOCABULARY

NUM_BROKERS = 3
NUM_BATCHES = 4
SILENT_S = 60.0


class Died(Exception):
    """The learner's process is gone."""


class Link:
    """In a ``PeerClient``'s place: what is sent reaches the ledger until ``left`` messages that must arrive have; all later
    ones are lost with the learner."""

    def __init__(self, world: LedgerHarness, me: SessionKey, left: float) -> None:
        self.world = world
        self.me = me
        self.left = left
        self.num_acknowledged = 0
        self.num_unacknowledged = 0
        self.welcome: Welcome | None = None
        self.endpoint = ""

    async def send(self, message: Message) -> None:
        if isinstance(message, SEQUENCED):
            if self.left <= 0:
                self.num_unacknowledged += 1
                return
            self.left -= 1
            self.num_acknowledged += 1
        self.deliver(message)

    def deliver(self, message: Any) -> list[Action]:
        actions = self.world.send(self.me, message)
        refused = [each.message for each in actions if isinstance(each, Reply) and isinstance(each.message, Refused)]
        assert not refused, f"{message} is refused: {refused}"
        return actions


class Weights:
    def __init__(self, content: str) -> None:
        self._content = content

    def digest(self) -> str:
        return self._content


@dataclass
class Disk:
    """What the learner's directory keeps."""

    root: Path
    checkpoints: list[tuple[int, str]] = field(default_factory=lambda: [(0, "w")])


@dataclass
class Course:
    """How one life of the learner goes."""

    cuts: tuple[int, ...]
    """Of each broker: how many messages reach it."""
    is_deterministic: bool
    checkpoint_every: int
    announces_late: bool
    """A version and the report before it go out only after the next batch was asked for."""


class Life:
    """One life of the learner."""

    def __init__(self, number: int, worlds: list[LedgerHarness], disk: Disk, course: Course) -> None:
        self.me = SessionKey("learner", f"life-{number}")
        self.worlds = worlds
        self.disk = disk
        self.course = course
        self.links = [Link(world, self.me, left) for world, left in zip(worlds, course.cuts, strict=True)]
        self.lines = [BrokerConnection(each, "", lambda link=link: link, _nobody) for each, link in enumerate(self.links)]  # type: ignore[misc]
        self.versions = Versions(disk.root, self.me.session)
        self.waiting: list[Published | Trained] = []
        self.number = number

    async def run(self) -> None:
        """Raises: Died; ends when all brokers have ended the run."""
        welcomes = [self._hello(link) for link in self.links]
        for line in self.lines:
            line.open()
        welcome = merged_welcome(welcomes)
        self.versions.begin(welcome, *welcomes)
        self.next_batch, self.weights = self.disk.checkpoints[-1]
        self.saved = self.next_batch
        self.newest_trained = welcome.trained_batches
        self.version = 0
        for link in self.links:
            link.deliver(Resume(next_batch=self.next_batch))
        await self._publish()
        while await self._has_batch():
            await self._train()
        await self._announce()

    def _hello(self, link: Link) -> Welcome:
        (welcome,) = [
            each.message
            for each in link.world.hello(self.me, "learner")
            if isinstance(each, Reply) and isinstance(each.message, Welcome)
        ]
        link.welcome = welcome
        return welcome

    async def _publish(self) -> None:
        if self.next_batch < self.newest_trained:
            return
        await self._announce()
        self.version = self.versions.number(Weights(self.weights), self.next_batch)
        self.versions.reserve(self.version, self.next_batch)
        self.versions.note_digest(self.version, self.weights)
        self.waiting.append(
            Published(
                policy_version=self.version, endpoint=f"tcp://{self.me.session}:1", digest=self.weights, num_bytes=1,
                trained_batches=self.next_batch, vocabulary=VOCABULARY,
            )
        )  # fmt: skip

    async def _announce(self) -> None:
        for message in self.waiting:
            for line in self.lines:
                await line.announce(message)
        self.waiting.clear()

    async def _has_batch(self) -> bool:
        if not self.course.announces_late or not self.next_batch:
            await self._announce()
        answers = [self._request(link) for link in self.links]
        await self._announce()
        for place, link in enumerate(self.links):
            if answers[place] is None:
                answers[place] = self._generated(link)
        if None in answers:
            raise Died
        assert len(set(answers)) == 1, answers
        return answers[0] == "batch"

    def _request(self, link: Link) -> str | None:
        return _answer(link.world.request_batch(self.next_batch, self.version, self.me))

    def _generated(self, link: Link) -> str | None:
        """Roll out with the newest version that all brokers have announced, until the batch is there."""
        for _ in range(4):
            version = min(world.ledger.state.batches.newest_version for world in self.worlds)
            for lease in link.world.lease(R1, 8, version) if version else ():
                link.world.episode(R1, lease, version)
            answer = _answer(link.world.tick()) or self._request(link)
            if answer is not None:
                return answer
        return None

    async def _train(self) -> None:
        index = self.next_batch
        self.weights += f".{index}" if self.course.is_deterministic else f".{index}({self.number})"
        self.next_batch += 1
        if self.next_batch < self.newest_trained:
            self.version = 0
        await self._publish()
        self.waiting.append(Trained(index=index, policy_version=self.version, metrics={"loss": 0.5}))
        if self.next_batch - self.saved >= self.course.checkpoint_every:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """As without a background: nothing goes on before the brokers have the reports."""
        await self._announce()
        if any(line.acknowledged_batches() < self.next_batch for line in self.lines):
            raise Died
        self.disk.checkpoints.append((self.next_batch, self.weights))
        self.saved = self.next_batch
        for line in self.lines:
            await line.send(Checkpointed(next_batch=self.next_batch, policy_version=self.version))


async def _nobody(line: BrokerConnection, answer: object) -> None:
    raise AssertionError(f"{answer} came")


def _answer(actions: list[Action]) -> str | None:
    for action in actions:
        if isinstance(action, DeliverBatch):
            return "batch"
        if isinstance(action, Reply) and isinstance(action.message, EndOfRun):
            return "end"
    return None


def brokers() -> list[LedgerHarness]:
    return [
        LedgerHarness(
            config_with(broker=number, num_brokers=NUM_BROKERS, num_batches=NUM_BATCHES, groups_per_batch=1, max_lag=4)
        )
        for number in range(NUM_BROKERS)
    ]


def lived(root: Path, courses: list[Course]) -> list[LedgerHarness]:
    """Lives, one after the other, and a last one that nothing stops."""
    worlds, disk = brokers(), Disk(root)
    last = Course((10**6,) * NUM_BROKERS, courses[-1].is_deterministic, courses[-1].checkpoint_every, False)
    for number, course in enumerate([*courses, last]):
        for world in worlds:
            # The former learner is silent by now, and so is the rollout.
            world.tick(SILENT_S)
            world.hello(R1)
        try:
            asyncio.run(Life(number, worlds, disk, course).run())
        except Died:
            assert course is not last, "the last one waits for something that does not come"
    return worlds


def require_whole(worlds: list[LedgerHarness]) -> None:
    for number, world in enumerate(worlds):
        findings = Findings()
        connection = world.store._connection
        order = read_order(connection)
        audit_batches(connection, findings, Rules(group_size=2, groups_per_batch=1, max_lag=4), order)
        notes = audit_versions(findings, order)
        assert not findings.counts, f"broker {number}: {findings.texts}"
        assert not notes, f"broker {number}: {notes}"
        assert order.newest_trained == NUM_BATCHES
        batches = world.ledger.state.batches
        assert batches.newest is not None
        assert batches.newest == worlds[0].ledger.state.batches.newest, "all end with the same weights under one number"
        assert world.ledger.state.finished
    digests: dict[int, set[str]] = {}
    for world in worlds:
        for version, digest in world.store._connection.execute("SELECT policy_version, digest FROM versions"):
            digests.setdefault(version, set()).add(digest)
    assert all(len(found) == 1 for found in digests.values()), f"a number has two contents: {digests}"


MORE = [(1, 0, 0), (2, 1, 0), (0, 1, 2), (4, 4, 0)]
"""How many more messages than ``told`` each broker gets: no more than a broker can be behind while batches still come."""


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_wherever_the_learner_dies_the_next_one_completes_every_ledger(
    tmp_path: Path, is_deterministic: bool, checkpoint_every: int
) -> None:
    for told in range(2 * NUM_BATCHES):
        for place, more in enumerate(MORE):
            cuts = tuple(told + each for each in more)
            course = Course(cuts, is_deterministic, checkpoint_every, announces_late=bool((told + place) % 2))
            require_whole(lived(tmp_path / f"{told}-{place}", [course]))


CUTS = st.tuples(*[st.integers(0, 14)] * NUM_BROKERS)


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(CUTS, st.booleans()), min_size=2, max_size=4),
    st.booleans(),
    st.sampled_from([1, 2, 3]),
)
def test_however_often_it_dies_every_ledger_is_completed(
    tmp_path_factory: pytest.TempPathFactory,
    lives: list[tuple[tuple[int, ...], bool]],
    is_deterministic: bool,
    checkpoint_every: int,
) -> None:
    courses = [Course(cuts, is_deterministic, checkpoint_every, late) for cuts, late in lives]
    require_whole(lived(tmp_path_factory.mktemp("run"), courses))
