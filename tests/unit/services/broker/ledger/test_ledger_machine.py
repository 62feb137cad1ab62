"""The ledger under random events, crashes of every process included, against a model that keeps only what was promised."""

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gspo_protocol.messages import (
    Ack,
    Checkpointed,
    EndOfRun,
    Goodbye,
    Graded,
    Heartbeat,
    LeaseEnded,
    LeaseKey,
    Refused,
    Release,
    Resume,
)
from gspo_services.broker.ledger.actions import Action, GrantLease, SessionKey
from gspo_services.broker.ledger.fencing import LEARNER_LEASE_S
from gspo_services.broker.ledger.ledger import Ledger
from tests.support.broker.ledger import SAMPLING, LedgerHarness, chunk, config_with, delivered, replies
from tests.support.broker.peers import logprobs_of, tokens_of

WEATHER: Counter[str] = Counter()
MAX_LAG = 2
CONFIG = config_with(
    num_batches=5,
    max_lag=MAX_LAG,
    max_attempts=2,
    failure_budget=1000,
    evaluate_every_batches=2,
    num_eval_tasks=2,
    num_train_tasks=7,
)


def durable_state(ledger: Ledger) -> dict[str, object]:
    """All that a restart must bring back."""
    state = ledger.state
    in_play = [each.group_id for split in ("train", "eval") for each in state.groups.of_split(split)]  # type: ignore[arg-type]
    # How far a trajectory has come may be counted beside its row.
    rows = {"_extensions": None, "_trajectories": [state.groups.members(group_id) for group_id in sorted(in_play)]}
    return {
        "groups": {**vars(state.groups), **rows},
        "batches": vars(state.batches),
        "evaluations": vars(state.evaluations),
        "next_prompt": state.next_prompt,
        "batched": state.num_batched_groups,
        "dropped": state.num_dropped,
        "run": state.run,
    }


@dataclass
class Beliefs:
    """What a rollout believes; ``lost`` are leases that it has lost and was not yet told about."""

    key: SessionKey
    version: int = 0
    leases: list[GrantLease] = field(default_factory=list)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens sent and acknowledged under a lease: (trajectory, epoch) -> length."""
    grades: list[GrantLease] = field(default_factory=list)
    """Groups that it may grade."""


class LedgerMachine(RuleBasedStateMachine):
    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.harness = LedgerHarness(self.config)
        self.rollouts = [Beliefs(SessionKey(f"r{index}", "0")) for index in range(3)]
        self.learner = SessionKey("learner", "0")
        self.lives = 0
        self.version = 0
        self.position = 0
        self.checkpoint = 0
        self.newest_trained = 0
        self.other_weights = False
        self.acknowledged: dict[int, int] = {}
        self.batches: dict[int, tuple[int, ...]] = {}
        self.epochs: set[tuple[int, int]] = set()

    @initialize()
    def start(self) -> None:
        for rollout in self.rollouts:
            self.harness.hello(rollout.key)
        self.learner_starts(self.learner)

    # --- rollouts ---------------------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 2), capacity=st.integers(1, 6))
    def lease(self, index: int, capacity: int) -> None:
        rollout = self.rollouts[index]
        for grant in self.harness.lease(rollout.key, capacity, rollout.version):
            assert (grant.trajectory_id, grant.epoch) not in self.epochs, "two writers of one trajectory"
            self.epochs.add((grant.trajectory_id, grant.epoch))
            if grant.members:
                rollout.grades.append(grant)
                continue
            assert grant.num_tokens == self.acknowledged.get(grant.trajectory_id, 0)
            WEATHER["resumed trajectory"] += int(grant.num_tokens > 0)
            rollout.leases.append(grant)
            rollout.sent[grant.trajectory_id, grant.epoch] = grant.num_tokens

    @rule(index=st.integers(0, 2), to=st.integers(0, 3))
    def load_weights(self, index: int, to: int) -> None:
        self.rollouts[index].version = max(self.rollouts[index].version, self.version - to)

    @precondition(lambda self: any(rollout.leases for rollout in self.rollouts))
    @rule(pick=st.integers(0, 1000), num_tokens=st.integers(1, 4))
    def grow(self, pick: int, num_tokens: int) -> None:
        rollout, lease = self.pick(pick)
        self.send_tokens(rollout, lease, num_tokens)

    def send_tokens(self, rollout: Beliefs, lease: GrantLease, num_tokens: int) -> None:
        key = (lease.trajectory_id, lease.epoch)
        offset = rollout.sent[key]
        if offset + num_tokens > SAMPLING.max_tokens:
            return
        made = chunk(lease, offset, num_tokens, rollout.version)
        # Alone or among others: the usual ones among others are counted in another way.
        actions = self.harness.send_chunks(rollout.key, [made]) if offset % 2 else self.harness.send(rollout.key, made)
        if self.accepted(actions):
            rollout.sent[key] += num_tokens
            self.acknowledged[lease.trajectory_id] = offset + num_tokens
        else:
            rollout.leases.remove(lease)

    @rule(index=st.integers(0, 2), capacity=st.integers(0, 6), keep=st.integers(0, 2))
    def work(self, index: int, capacity: int, keep: int) -> None:
        """The ordinary course: newest weights, more leases, all but ``keep`` episodes run to their ends."""
        rollout = self.rollouts[index]
        rollout.version = self.version
        if capacity:
            self.lease(index, capacity)
        for lease in rollout.leases[:keep]:
            self.send_tokens(rollout, lease, 1)
        for lease in rollout.leases[keep:]:
            self.send_tokens(rollout, lease, 2)
            if lease in rollout.leases:
                rollout.leases.remove(lease)
                length = rollout.sent[lease.trajectory_id, lease.epoch]
                self.harness.finish(rollout.key, lease, length, float(lease.trajectory_id % 2))

    @rule(index=st.integers(0, 2), num_batches=st.integers(1, 2))
    def work_and_train(self, index: int, num_batches: int) -> None:
        for _ in range(num_batches):
            self.work(index, 6, 0)
            self.train()

    @precondition(lambda self: any(rollout.leases for rollout in self.rollouts))
    @rule(pick=st.integers(0, 1000), reward=st.sampled_from([0.0, 0.5, 1.0]))
    def finish(self, pick: int, reward: float) -> None:
        rollout, lease = self.pick(pick)
        rollout.leases.remove(lease)
        length = rollout.sent[lease.trajectory_id, lease.epoch]
        if length:
            self.harness.finish(rollout.key, lease, length, reward)

    @precondition(lambda self: any(rollout.leases for rollout in self.rollouts))
    @rule(pick=st.integers(0, 1000), failed=st.booleans())
    def release(self, pick: int, failed: bool) -> None:
        rollout, lease = self.pick(pick)
        rollout.leases.remove(lease)
        message = Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="r", failed=failed)
        self.harness.send(rollout.key, message)

    @rule(index=st.integers(0, 2))
    def an_episode_fails_twice(self, index: int) -> None:
        rollout = self.rollouts[index]
        rollout.version = self.version
        for _ in range(2):
            self.lease(index, 1)
            if rollout.leases:
                self.harness.fail(rollout.key, rollout.leases.pop())

    @precondition(lambda self: any(rollout.sent for rollout in self.rollouts))
    @rule(pick=st.integers(0, 1000), offset=st.integers(0, 8), num_tokens=st.integers(1, 8))
    def send_an_old_chunk_again(self, pick: int, offset: int, num_tokens: int) -> None:
        """A chunk under any lease ever held, anywhere inside what was sent, must change nothing."""
        senders = [rollout for rollout in self.rollouts if rollout.sent]
        rollout = senders[pick % len(senders)]
        keys = sorted(rollout.sent)
        trajectory_id, epoch = keys[pick % len(keys)]
        if offset + num_tokens > rollout.sent[trajectory_id, epoch]:
            return
        lease = next(
            (lease for lease in rollout.leases if (lease.trajectory_id, lease.epoch) == keys[pick % len(keys)]), None
        )
        if lease is not None and offset < lease.num_tokens:
            return  # that would be a new chunk in the wrong place, which ends the lease
        old = GrantLease(
            to=rollout.key,
            trajectory_id=trajectory_id,
            epoch=epoch,
            group_id=0,
            split="train",
            task_index=0,
            seed=0,
            sampling=SAMPLING,
            num_tokens=0,
        )
        before = durable_state(self.harness.restored())
        self.harness.send(rollout.key, chunk(old, offset, num_tokens, 1))
        assert durable_state(self.harness.restored()) == before

    @rule(index=st.integers(0, 2))
    def heartbeat(self, index: int) -> None:
        rollout = self.rollouts[index]
        keys = [LeaseKey(lease.trajectory_id, lease.epoch) for lease in rollout.leases]
        actions = self.harness.send(rollout.key, Heartbeat(policy_version=rollout.version, status="serving", leases=keys))
        ended = {(end.trajectory_id, end.epoch) for end in replies(actions, LeaseEnded)}
        rollout.leases = [lease for lease in rollout.leases if (lease.trajectory_id, lease.epoch) not in ended]

    @rule(index=st.integers(0, 2))
    def rollout_is_killed(self, index: int) -> None:
        self.lives += 1
        self.rollouts[index] = Beliefs(SessionKey(f"r{index}", f"{self.lives}"))
        self.harness.hello(self.rollouts[index].key)

    # --- time and the broker ------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        WEATHER["lease expired"] += len(replies(self.harness.tick(seconds), LeaseEnded))

    @rule(index=st.integers(0, 2))
    def a_rollout_sleeps_through_its_leases(self, index: int) -> None:
        self.work(index, 1, 6)
        self.time_passes(CONFIG.lease_s + 1)

    @rule()
    def broker_is_killed(self) -> None:
        self.harness.restart()
        for rollout in self.rollouts:
            self.harness.hello(rollout.key)
        self.harness.hello(self.learner, "learner")

    # --- the learner --------------------------------------------------------------------------------------------------

    @rule()
    def train(self) -> None:
        actions = self.harness.request_batch(self.position, self.version, self.learner)
        if replies(actions, EndOfRun):
            assert self.position == CONFIG.num_batches
            return
        if delivered(actions) != [self.position]:
            return
        WEATHER["batch again" if self.position in self.batches else "batch"] += 1
        row, items = self.harness.store.batch(self.position)
        assert self.batches.setdefault(self.position, row.group_ids) == row.group_ids, "delivered with other content"
        for trajectory, _ in items:
            assert trajectory.min_version >= row.policy_version - MAX_LAG, "a token that is too old"
            assert trajectory.num_action_tokens > 0
        made = 0 if self.position + 1 < self.newest_trained else self.version
        assert not replies(self.harness.trained(self.position, made, self.learner), Refused)
        self.position += 1
        self.publish()

    @precondition(lambda self: self.position > self.checkpoint)
    @rule()
    def save_checkpoint(self) -> None:
        message = Checkpointed(next_batch=self.position, policy_version=self.version)
        assert not replies(self.harness.send(self.learner, message), Refused)
        self.checkpoint = self.position

    @rule()
    def a_second_learner_is_turned_away(self) -> None:
        self.harness.send(self.learner, Heartbeat(policy_version=self.version, status="serving", leases=[]))
        before = durable_state(self.harness.ledger)
        (refused,) = replies(self.harness.hello(SessionKey("learner", "second"), "learner"), Refused)
        assert not refused.fatal
        assert durable_state(self.harness.ledger) == before
        assert durable_state(self.harness.restored()) == before
        WEATHER["second learner"] += 1

    @rule(in_order=st.booleans(), other_weights=st.booleans())
    def learner_ends(self, in_order: bool, other_weights: bool) -> None:
        """Its successor trains batches again, up to the newest version, and makes the same weights or others."""
        if in_order:
            self.harness.send(self.learner, Goodbye())
        else:
            WEATHER["lease expired"] += len(replies(self.harness.tick(LEARNER_LEASE_S), LeaseEnded))
        self.lives += 1
        self.position = self.checkpoint
        self.other_weights = other_weights
        self.learner_starts(SessionKey("learner", f"{self.lives}"))

    def learner_starts(self, sender: SessionKey) -> None:
        self.learner = sender
        self.harness.hello(sender, "learner")
        assert not replies(self.harness.send(sender, Resume(next_batch=self.checkpoint)), Refused)
        self.publish()

    def publish(self) -> None:
        if self.position < self.newest_trained:
            return
        if self.position > self.newest_trained or self.other_weights or not self.version:
            self.version += 1
        self.newest_trained, self.other_weights = self.position, False
        assert not replies(self.harness.publish(self.version, self.position, self.learner), Refused)

    # --- what must always hold -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        for trajectory_id, length in self.acknowledged.items():
            payload = self.harness.store.payload(trajectory_id)
            assert payload.token_ids.tolist() == tokens_of(trajectory_id, length).tolist()
            assert payload.logprobs.tolist() == logprobs_of(trajectory_id, length).tolist()
            assert sum(segment.num_tokens for segment in payload.segments) == length
            assert payload.state == {"at": length}

    @invariant()
    def each_prompt_is_in_play_in_one_batch_or_reported_as_dropped(self) -> None:
        state = self.harness.ledger.state
        batched = [group_id for group_ids in self.batches.values() for group_id in group_ids]
        assert len(set(batched)) == len(batched), "trained twice"
        in_play = [row.prompt for row in state.groups.of_split("train")]
        dropped = [line["prompt"] for line in self.harness.lines if line["event"] == "dropped"]
        checkpointed = state.num_batched_groups
        assert len(in_play) + len(dropped) + checkpointed == state.next_prompt, "a prompt was skipped in silence"
        assert len(set(in_play) | set(dropped)) == len(in_play) + len(dropped)

    @invariant()
    def the_rows_are_the_state(self) -> None:
        assert durable_state(self.harness.restored()) == durable_state(self.harness.ledger)

    @invariant()
    def memory_is_bounded_by_the_window(self) -> None:
        assert self.harness.ledger.state.groups.num_training <= (MAX_LAG + 1) * CONFIG.groups_per_batch

    @invariant()
    def what_is_counted_as_it_changes_is_what_a_look_at_everything_finds(self) -> None:
        groups, version = self.harness.ledger.state.groups, 2**20
        outstanding = groups.outstanding(version)
        oldest = Counter(each.oldest_version for each in outstanding)
        assert groups.num_by_oldest_version(version) == oldest
        assert groups.num_training == len(outstanding)
        assert groups.num_complete == sum(each.complete for each in outstanding)
        assert [groups.has_older_than(each) for each in (2, 4, 8)] == [min(oldest, default=9) < each for each in (2, 4, 8)]
        by_peer = {row.holder_peer: groups.held_by(row.holder_peer) for row in groups.leased()}
        assert sorted(row.trajectory_id for rows in by_peer.values() for row in rows) == [
            row.trajectory_id for row in groups.leased()
        ]
        assert all(row.holder_peer == peer for peer, rows in by_peer.items() for row in rows)

    def teardown(self) -> None:
        WEATHER.update(line.get("reason", line["event"]) for line in self.harness.lines)

    # --- inside ------------------------------------------------------------------------------------------------------

    def pick(self, pick: int) -> tuple[Beliefs, GrantLease]:
        held = [(rollout, lease) for rollout in self.rollouts for lease in rollout.leases]
        return held[pick % len(held)]

    def accepted(self, actions: list[Action]) -> bool:
        assert replies(actions, Ack), "whatever arrives in order is acknowledged"
        assert not replies(actions, Refused)
        return not replies(actions, LeaseEnded)


class GradingMachine(LedgerMachine):
    """The same where groups are graded: whatever is in a batch has the rewards of one whole answer."""

    config = replace(CONFIG, grades_groups=True)

    def __init__(self) -> None:
        super().__init__()
        self.graded: dict[int, list[float]] = {}
        """By group: the rewards that were taken."""
        self.num_looked_at = 0
        """Batches."""

    @precondition(lambda self: any(rollout.grades for rollout in self.rollouts))
    @rule(pick=st.integers(0, 1000), size=st.sampled_from([2, 2, 2, 2, 1, 3]), again=st.booleans())
    def grade(self, pick: int, size: int, again: bool) -> None:
        """Perhaps with too many rewards or too few, perhaps under a lease that is lost, perhaps twice."""
        message = self.send_grade(*self.pick_grade(pick), size)
        if again:
            before = durable_state(self.harness.restored())
            self.harness.send(self.rollouts[0].key, message)
            assert durable_state(self.harness.restored()) == before

    @precondition(lambda self: any(rollout.grades for rollout in self.rollouts))
    @rule(pick=st.integers(0, 1000), failed=st.booleans())
    def release_a_grade(self, pick: int, failed: bool) -> None:
        rollout, lease = self.pick_grade(pick)
        message = Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="r", failed=failed)
        self.harness.send(rollout.key, message)

    @rule(index=st.integers(0, 2), size=st.sampled_from([2, 2, 3]))
    def work_and_grade(self, index: int, size: int) -> None:
        """The ordinary course, perhaps with a wrong answer."""
        self.work(index, 6, 0)
        self.lease(index, 3)
        while self.rollouts[index].grades:
            self.send_grade(self.rollouts[index], self.rollouts[index].grades.pop(), size)
        self.train()

    @invariant()
    def a_group_has_the_rewards_of_its_grade_or_none(self) -> None:
        state = self.harness.ledger.state
        for group in state.groups.of_split("train"):
            members = state.groups.members(group.group_id)
            is_graded = group.group_id in self.graded
            assert is_graded == (group.status == "complete") == all(row.status == "finished" for row in members)
            assert not is_graded or [row.reward for row in members] == self.graded[group.group_id]

    @invariant()
    def a_batch_has_graded_groups_alone(self) -> None:
        for index in range(self.num_looked_at, len(self.batches)):
            _, items = self.harness.store.batch(index)
            for group_id in self.batches[index]:
                assert [row.reward for row, _ in items if row.group_id == group_id] == self.graded[group_id]
            self.num_looked_at += 1

    def send_grade(self, rollout: Beliefs, lease: GrantLease, size: int) -> Graded:
        row = self.harness.ledger.state.groups.trajectory(lease.trajectory_id)
        is_held = (
            row is not None
            and (row.status, row.epoch) == ("leased", lease.epoch)
            and (row.holder_peer, row.holder_session) == rollout.key
        )
        sent = [float(2 * lease.epoch), float(2 * lease.epoch + 1), 0.0][:size]
        message = Graded(
            trajectory_id=lease.trajectory_id, epoch=lease.epoch, rewards=sent, components=[{"epoch": lease.epoch}] * size
        )
        actions = self.harness.send(rollout.key, message)
        assert replies(actions, Ack)
        assert bool(replies(actions, Refused)) == (is_held and size != 2)
        assert bool(replies(actions, LeaseEnded)) == (not is_held or size != 2)
        if is_held and size == 2:
            assert lease.group_id not in self.graded
            self.graded[lease.group_id] = sent
        WEATHER["graded" if is_held and size == 2 else "refused" if is_held else "too late"] += 1
        return message

    def pick_grade(self, pick: int) -> tuple[Beliefs, GrantLease]:
        held = [(rollout, lease) for rollout in self.rollouts for lease in rollout.grades]
        rollout, lease = held[pick % len(held)]
        rollout.grades.remove(lease)
        return rollout, lease


def test_the_ledger_keeps_its_promises_whatever_happens() -> None:
    WEATHER.clear()
    # Reproducible, so that the events that must have happened do.
    run_state_machine_as_test(
        LedgerMachine, settings=settings(max_examples=40, stateful_step_count=60, deadline=None, derandomize=True)
    )
    happened = {kind for kind, count in WEATHER.items() if count}
    assert happened >= {"batch", "batch again", "lease expired", "stale", "failed", "eval", "resumed trajectory"}


def test_the_ledger_keeps_its_promises_where_groups_are_graded() -> None:
    WEATHER.clear()
    run_state_machine_as_test(
        GradingMachine, settings=settings(max_examples=16, stateful_step_count=60, deadline=None, derandomize=True)
    )
    happened = {kind for kind, count in WEATHER.items() if count}
    assert happened >= {"batch", "batch again", "lease expired", "failed", "graded", "refused", "too late"}
