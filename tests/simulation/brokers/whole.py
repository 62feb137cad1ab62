"""What must always hold of a run as a whole: what is trained, published and saved, over the ledgers of all brokers."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from msgspec.structs import replace

from gspo.model.packing import BatchGroup, TrainSequence
from gspo_protocol.codec import Array
from gspo_protocol.digests import tensor_digest
from gspo_protocol.messages import Batch
from gspo_services.broker.sending import TokenSpan
from tests.simulation.agents.chat import Conversation
from tests.simulation.audit.books import Rules, Shared
from tests.simulation.audit.broker import BrokerAudit
from tests.simulation.audit.runs import AgentRun
from tests.simulation.brokers.lines import Lines

WHOLE = "several brokers: a batch is trained with all its shares"


class WholeAudit:
    """Hands what concerns one broker to its books, and compares them."""

    def __init__(self, rules: Rules, shared: Shared, brokers: tuple[BrokerAudit, ...]) -> None:
        self.rules = rules
        self.shared = shared
        self.brokers = brokers
        self.happened = shared.happened
        self.require = shared.require
        self._lines = Lines(shared, brokers)

    def of(self, number: int) -> BrokerAudit:
        """The books of the broker that has this id."""
        return self.brokers[number % len(self.brokers)]

    # --- what all brokers have --------------------------------------------------------------------------------------------

    @property
    def num_trained(self) -> int:
        """Batches that every broker knows to be trained."""
        return min(broker.durable.num_trained for broker in self.brokers)

    @property
    def newest_version(self) -> int:
        """That every broker knows."""
        return min(broker.durable.newest_version for broker in self.brokers)

    @property
    def is_stopped(self) -> bool:
        """Whether every broker was asked to stop the run."""
        return all(broker.durable.run.stop_reason for broker in self.brokers)

    @property
    def num_losses(self) -> int:
        return sum(broker.num_losses for broker in self.brokers)

    # --- agents -----------------------------------------------------------------------------------------------------------

    def agent_begins(self, session: str, trajectory_id: int, epoch: int) -> AgentRun:
        return self.of(trajectory_id).agent_begins(session, trajectory_id, epoch)

    def answered(self, run: AgentRun, question: Conversation, token_ids: Sequence[int], *, goes_on: bool) -> None:
        self.of(run.trajectory_id).answered(run, question, token_ids, goes_on=goes_on)

    def does_step(self, run: AgentRun, name: str, arguments: str) -> int:
        return self.of(run.trajectory_id).does_step(run, name, arguments)

    def step_returned(self, run: AgentRun, name: str, arguments: str, result: object) -> None:
        self.of(run.trajectory_id).step_returned(run, name, arguments, result)

    def counts_divergences(self, session: str, number: float) -> None:
        self.brokers[0].counts_divergences(session, number)

    # --- the learner ------------------------------------------------------------------------------------------------------

    def serves(self, version: int, content: bytes) -> None:
        """A learner is about to serve a version."""
        published = self.shared.published
        self.happened["the same weights under their number again"] += int(version in published)
        self.require(
            published.get(version, content) == content,
            "one version, one content",
            lambda: (
                f"version {version} is given to weights {tensor_digest(content)[:12]}, but was already given to "
                f"{tensor_digest(published[version])[:12]}"
            ),
        )
        published[version] = content

    def trains_with(self, batch: Batch, learning_rate: float, own_rate: float) -> None:
        """A learner trains a batch; ``own_rate`` is that of its settings."""
        for broker in self.brokers:
            broker.trains_with(batch, learning_rate, own_rate)

    def trains(
        self,
        history: Sequence[tuple[int, ...]],
        batch: Batch,
        arrays: Mapping[str, Array],
        spans: Sequence[TokenSpan],
        groups: Sequence[BatchGroup],
    ) -> None:
        """A learner trains a batch, which it reads as ``groups``; its weights have this history. ``spans``: what it received
        of each trajectory."""
        index = batch.index
        self.require(
            index == len(history),
            "G2 exactly once",
            lambda: f"batch {index} trains weights that were trained on {len(history)} batches",
        )
        episodes = _of_episodes(groups)
        places = range(len(batch.items))
        self.require(
            list(places) == sorted(places, key=lambda place: self._number_of(batch, place)),
            WHOLE,
            lambda: f"batch {index} is trained in the order {[self._number_of(batch, place) for place in places]}",
        )
        for broker in self.brokers:
            mine = [place for place in places if self._number_of(batch, place) == broker.number]
            self._require_share(broker, batch, bool(mine))
            if mine:
                share, its_arrays = self._share(broker, batch, arrays, mine)
                its_spans, its_episodes = ([every[place] for place in mine] for every in (spans, episodes))
                broker.trains_share(history, share, its_arrays, its_spans, its_episodes)
        self._lines.expect(index, {broker.number for broker in self.brokers if index not in broker.durable.quarantined})

    def _number_of(self, batch: Batch, place: int) -> int:
        return batch.items[place].group_id % len(self.brokers)

    def _require_share(self, broker: BrokerAudit, batch: Batch, is_trained: bool) -> None:
        """The share is trained if it was not quarantined."""
        row = broker.durable.quarantined.get(batch.index)
        self.require(
            row is None or not is_trained,
            "poison: a batch that was quarantined is not trained",
            lambda: f"batch {batch.index} is trained, and was quarantined: {row and row.reason}",
        )
        self.require(
            row is not None or is_trained,
            WHOLE,
            lambda: f"batch {batch.index} is trained without the share of broker {broker.number}",
        )
        if len(self.brokers) > 1:
            self.happened["share skipped, the others trained"] += row is not None

    def _share(
        self, broker: BrokerAudit, batch: Batch, arrays: Mapping[str, Array], places: Sequence[int]
    ) -> tuple[Batch, dict[str, Array]]:
        """What the learner has of one broker's share, as the broker would have sent it."""
        if len(self.brokers) == 1 or batch.index not in broker.shares:
            return batch, dict(arrays)
        items, *rows = zip(*(each for place, each in enumerate(batch.split(arrays)) if place in places), strict=True)
        sent, sent_arrays = broker.shares[batch.index]
        self.require(
            batch.values == sent.values,
            WHOLE,
            lambda: f"batch {batch.index} is trained with {batch.values}, broker {broker.number} recorded {sent.values}",
        )
        turn_rewards, sequences = (np.concatenate(each) for each in rows)
        own = {"turn_rewards": turn_rewards, "sequences": sequences}
        for name in Batch.OPTIONAL_ARRAYS:
            of_turns = batch.of_turns(name, arrays)
            if of_turns is not None and (name in sent_arrays or any(of_turns[place].any() for place in places)):
                own[name] = np.concatenate([of_turns[place] for place in places])
        return replace(sent, items=list(items)), own

    def checkpoints(self, history: Sequence[tuple[int, ...]], next_batch: int) -> None:
        """A learner saves a checkpoint: its history is that of the committed batches, in order."""
        committed = [self._trained_for(index) for index in range(next_batch)]
        self.require(
            list(history) == committed,
            "G2 exactly once",
            lambda: f"a checkpoint after batch {next_batch - 1} has the history {history}, committed is {committed}",
        )

    def _trained_for(self, index: int) -> tuple[int, ...]:
        return tuple(trajectory_id for broker in self.brokers for trajectory_id in broker.trained_for(index))

    # --- the end ----------------------------------------------------------------------------------------------------------

    def run_is_complete(self, history: Sequence[tuple[int, ...]]) -> None:
        """The run is over; its last checkpoint has this history."""
        if not self.is_stopped:
            self.checkpoints(history, self.rules.num_batches)
            for broker in self.brokers:
                broker.is_complete()
        else:
            self.checkpoints(history, len(history))
            self.happened["run stopped"] += 1

    def lines_are_whole(self, number: int, lines: Iterable[Mapping[str, object]]) -> None:
        """Broker ``number`` has written these lines of metrics."""
        self._lines.compare(number, lines)


def _of_episodes(groups: Sequence[BatchGroup]) -> list[tuple[TrainSequence, ...]]:
    """The sequences of each episode."""
    found: list[tuple[TrainSequence, ...]] = []
    for group in groups:
        rest = (sequence.loaded() for sequence in group.sequences)
        assert group.sequences_per_episode is not None
        found += [tuple(islice(rest, number)) for number in group.sequences_per_episode]
    return found
