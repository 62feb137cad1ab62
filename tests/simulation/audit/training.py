"""What is trained was acknowledged, and is trained once, in order, and not too old."""
# ruff: noqa: B023 - the text of a violation is made at once

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, islice

from gspo.model.packing import BatchGroup, TrainSequence
from gspo_protocol.codec import Array
from gspo_protocol.messages import Batch
from gspo_protocol.messages.pieces import Pieces, pieces_in
from gspo_services.broker.ledger.sampling.task_order import trajectory_seed
from gspo_services.broker.rows import TrajectoryRow
from gspo_services.broker.sending import TokenSpan
from gspo_services.tasks.environments import score_of
from tests.simulation.audit.agents import SEEN, AgentAudit
from tests.simulation.audit.books import COMPARED, content_of, spelt
from tests.simulation.episodes import STOP, SimTasks, compared, expected_components, expected_turns, version_in


class TrainingAudit(AgentAudit):
    """Checks what the learner trains."""

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
        self.require(
            batch.index == len(history),
            "G2 exactly once",
            lambda: f"batch {batch.index} trains weights that were trained on {len(history)} batches",
        )
        quarantined = self.durable.quarantined.get(batch.index)
        self.require(
            quarantined is None,
            "poison: a batch that was quarantined is not trained",
            lambda: f"batch {batch.index} is trained, and was quarantined: {quarantined and quarantined.reason}",
        )
        known = self.contents.get(batch.index)
        self.require(
            known == (batch.policy_version, content_of(batch, arrays)),
            "G2 a batch is delivered again as it was",
            lambda: f"batch {batch.index} is trained with other content than was delivered",
        )
        turns: defaultdict[int, list[list[float]]] = defaultdict(list)
        seen = {trajectory_id for step in history for trajectory_id in step}
        for (item, rewards, _), span in zip(batch.split(arrays), spans, strict=True):
            self.require(
                item.trajectory_id not in seen,
                "G2 exactly once",
                lambda: f"trajectory {item.trajectory_id} is trained twice",
            )
            seen.add(item.trajectory_id)
            pieces = pieces_in({**span._asdict(), "turn_rewards": rewards})
            self._episode(batch, item.trajectory_id, span, pieces)
            row = self.durable.trajectories[item.trajectory_id]
            alone = self.alone[item.trajectory_id] if self.rules.compares else row
            if self.rules.agents:
                self._agents_rewards(row, pieces)
            else:
                rewards = alone.turn_rewards if self.rules.compares else pieces.turn_rewards
                self._rewards(alone, rewards, span.token_ids.tolist(), spelt(pieces.segments))
            if self.rules.compares:
                turns[row.group_id].append(list(pieces.turn_rewards))
        for group_id, found in turns.items():
            self._compared(group_id, found)
        for item, sequences in zip(batch.items, _of_episodes(groups), strict=True):
            self.trains_sequences(item.trajectory_id, sequences)

    def _episode(
        self,
        batch: Batch,
        trajectory_id: int,
        span: TokenSpan,
        pieces: Pieces,
    ) -> None:
        chunks = self.durable.chunks[trajectory_id]
        token_ids, logprobs = span.token_ids, span.logprobs
        self.require(
            token_ids.tobytes() == b"".join(chunk.token_ids for chunk in chunks)
            and logprobs.tobytes() == b"".join(chunk.logprobs for chunk in chunks),
            "G1 nothing acknowledged is lost",
            lambda: f"batch {batch.index}: trajectory {trajectory_id} is trained with other tokens than were acknowledged",
        )
        kinds = spelt(pieces.segments)
        versions = [run.version for run in pieces.version_runs for _ in range(run.num_tokens)]
        for place_in, ((kind, _), version, logprob) in enumerate(zip(kinds, versions, logprobs.tolist(), strict=True)):
            true = -1 if kind == "observation" else version_in(logprob)
            self.require(
                version == true,
                "G4 every token carries the version that made it",
                lambda: f"trajectory {trajectory_id}, token {place_in}: labelled version {version}, but made by {true}",
            )
            self.require(
                kind == "observation" or 0 <= batch.policy_version - true <= self.rules.max_lag,
                "G3 no token older than max_lag is trained",
                lambda: (
                    f"batch {batch.index} for version {batch.policy_version}: trajectory {trajectory_id}, token "
                    f"{place_in} was made by version {true}"
                ),
            )

    def _rewards(
        self, row: TrajectoryRow, rewards: Sequence[float], token_ids: Sequence[int], kinds: Sequence[tuple[str, int]]
    ) -> None:
        """The episode is one that could have been played in one go."""
        turns: list[tuple[list[int], list[int]]] = []
        position = 0
        for turn, run in groupby(kinds, key=lambda kind: kind[1]):
            marks = [kind for kind, _ in run]
            begin = position + marks.count("observation")
            turns.append((list(token_ids[position:begin]), list(token_ids[begin : position + len(marks)])))
            position += len(marks)
            self.require(
                turn == len(turns) - 1 and marks == sorted(marks, reverse=True),
                "G2 an episode is played as in one go",
                lambda: f"trajectory {row.trajectory_id}: segments {kinds}",
            )
        group = self.durable.groups[row.group_id]
        observations, expected = expected_turns(
            SimTasks("train").task(group.task_index),
            trajectory_seed(self.rules.seed, row.trajectory_id),
            self.rules.options,
            [action for _, action in turns],
        )
        self.require(
            observations == [observation for observation, _ in turns] and expected == list(rewards),
            "G2 an episode is played as in one go",
            lambda: (
                f"trajectory {row.trajectory_id}: turns {turns}, rewards {list(rewards)}; expected observations "
                f"{observations}, rewards {expected}"
            ),
        )

        components = expected_components(rewards, self.rules.options)
        self.happened["components trained"] += bool(components)
        self.require(
            row.components == components,
            "G2 an episode is played as in one go",
            lambda: f"trajectory {row.trajectory_id}: components {row.components}, expected {components}",
        )

    def _compared(self, group_id: int, found: Sequence[Sequence[float]]) -> None:
        """A group has the rewards that its answers have beside each other, with their last turns."""
        members = sorted(self.members(group_id), key=lambda row: row.trajectory_id)
        alone = [self.alone[row.trajectory_id] for row in members]
        texts = [" ".join(str(token) for token in self.last_answer(row) if token != STOP) for row in members]
        results = [score_of(each, None) for each in compared(texts, [sum(row.turn_rewards) for row in alone])]
        self.happened["compared group trained"] += 1
        for row, before, result, rewards in zip(members, alone, results, found, strict=True):
            expected = [0.0] * row.num_turns
            expected[row.last_turn] = result.reward
            components = {**before.components, **result.components}
            self.require(
                list(rewards) == list(row.turn_rewards) == expected and row.components == components,
                COMPARED,
                lambda: (
                    f"group {group_id}: trajectory {row.trajectory_id} is trained with {list(rewards)}, of "
                    f"{row.components}; expected {expected}, of {components}"
                ),
            )

    def _agents_rewards(self, row: TrajectoryRow, pieces: Pieces) -> None:
        """What an agent's episode earned when it ended, and without what was discarded then."""
        discarded = {segment.turn for segment in pieces.segments if segment.kind == "discarded"}
        trained = {segment.turn for segment in pieces.segments if segment.kind == "action"}
        self.happened["several sequences trained"] += max(segment.sequence for segment in pieces.segments) > 0
        self.happened["components trained"] += bool(row.components)
        self.require(
            discarded == set(row.discarded_turns)
            and not discarded & trained
            and list(pieces.turn_rewards) == list(row.turn_rewards),
            SEEN,
            lambda: (
                f"trajectory {row.trajectory_id}: turns {trained} are trained with rewards {list(pieces.turn_rewards)}; it "
                f"ended without {row.discarded_turns}, with {row.turn_rewards}"
            ),
        )

    def trained_for(self, index: int) -> tuple[int, ...]:
        """What was trained for a batch: nothing if it was quarantined."""
        if index in self.durable.quarantined:
            return ()
        return tuple(
            row.trajectory_id
            for group_id in self.durable.batches[index].group_ids
            for row in sorted(self.members(group_id), key=lambda row: row.trajectory_id)
        )

    def is_complete(self) -> None:
        """The run is over."""
        for group in self.durable.groups.values():
            if group.split == "train":
                self.require(
                    group.status in ("batched", "dropped", "filtered", "quarantined", "requeued", "resampled"),
                    "G2 no prompt is skipped",
                    lambda: f"prompt {group.prompt} is {group.status} at the end",
                )


def _of_episodes(groups: Sequence[BatchGroup]) -> list[tuple[TrainSequence, ...]]:
    """The sequences of each episode."""
    found: list[tuple[TrainSequence, ...]] = []
    for group in groups:
        rest = (sequence.loaded() for sequence in group.sequences)
        assert group.sequences_per_episode is not None
        found += [tuple(islice(rest, number)) for number in group.sequences_per_episode]
    return found
