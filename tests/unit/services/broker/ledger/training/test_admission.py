"""The windowed FIFO: its theorem, with whole runs of the ledger under random completions, and its rules one by one."""

import ast
import random
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_protocol.messages import Heartbeat
from gspo_services.broker.ledger.actions import GrantLease, SessionKey
from gspo_services.broker.ledger.admission import Admission, Outstanding, Window
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with, delivered

BROKER = Path(__file__).parents[6] / "services" / "broker"


def outstanding(*groups: tuple[int, bool]) -> list[Outstanding]:
    return [
        Outstanding(group_id=index, oldest_version=oldest_version, complete=done)
        for index, (oldest_version, done) in enumerate(groups)
    ]


def test_a_window_admits_one_batch_per_version_until_the_deadline() -> None:
    window = Window(Admission(max_lag=2, groups_per_batch=3), [], version=5)
    assert [window.add(5) for _ in range(10)] == [True] * 9 + [False]


def test_an_older_engine_has_a_narrower_window() -> None:
    window = Window(Admission(max_lag=2, groups_per_batch=3), [], version=5)
    assert [window.add(3) for _ in range(4)] == [True] * 3 + [False]
    assert [window.add(5) for _ in range(7)] == [True] * 6 + [False]


def test_without_lag_nothing_is_admitted_between_a_batch_and_the_publication_after_it() -> None:
    assert not Window(Admission(max_lag=0, groups_per_batch=3), [], version=6).add(5)


def test_a_full_window_lets_no_group_become_older() -> None:
    window = Window(Admission(max_lag=1, groups_per_batch=1), [4, 5, 5], version=5)
    assert not window.is_feasible
    window = Window(Admission(max_lag=1, groups_per_batch=1), [4, 5], version=5)
    assert window.is_feasible
    assert not window.extend(5, 4)
    assert window.extend(4, 5)
    assert window.is_feasible


def test_an_engine_that_is_too_old_gets_nothing_not_even_in_a_group_that_is_older_still() -> None:
    window = Window(Admission(max_lag=1, groups_per_batch=2), [2], version=5)
    assert not window.extend(2, 3)
    assert window.extend(2, 4)
    assert not window.add(3)


def test_the_oldest_version_that_is_allowed_is_the_oldest_token_that_may_be_trained() -> None:
    for version, max_lag in ((1, 0), (1, 2), (5, 0), (5, 3)):
        rules = Admission(max_lag=max_lag, groups_per_batch=1)
        trainable = [token for token in range(1, version + 1) if rules.allows(token, version)]
        assert trainable[0] == rules.oldest_allowed(version)


def test_no_other_module_of_the_broker_computes_with_max_lag() -> None:
    computing = {
        path.name
        for path in BROKER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.BinOp | ast.Compare) and "max_lag" in ast.unparse(node)
    }
    assert computing == {"admission.py"}


def test_a_batch_takes_the_oldest_complete_groups_and_may_pass_over_an_incomplete_one() -> None:
    groups = outstanding((5, False), (5, True), (4, True), (5, True))
    choice = Admission(max_lag=1, groups_per_batch=2).choose_batch(groups, version=5)
    assert choice.group_ids == (2, 1)


def test_a_batch_waits_for_a_group_that_would_be_too_old_afterwards() -> None:
    groups = outstanding((4, False), (5, True), (5, True))
    choice = Admission(max_lag=1, groups_per_batch=2).choose_batch(groups, version=5)
    assert choice.group_ids == ()
    assert choice.due == (0,)
    assert choice.num_complete == 2


def test_a_batch_waits_when_those_passed_over_would_not_fit_the_batches_until_their_deadline() -> None:
    two_passed_over = outstanding((4, False), (4, False), (5, True), (5, True))
    assert Admission(max_lag=2, groups_per_batch=2).choose_batch(two_passed_over, version=5).group_ids == (2, 3)
    three_passed_over = outstanding((4, False), (4, False), (4, False), (5, True), (5, True))
    assert Admission(max_lag=2, groups_per_batch=2).choose_batch(three_passed_over, version=5).due == (0, 1, 2)


def test_a_window_broken_from_outside_does_not_stop_the_run() -> None:
    groups = outstanding((3, True), (3, True), (3, True), (3, True))
    assert Admission(max_lag=1, groups_per_batch=2).choose_batch(groups, version=4).group_ids == (0, 1)


class Fleet:
    """Rollouts whose engines differ in pace, and a learner, without crashes: every order of completions may happen."""

    def __init__(self, rng: random.Random, max_lag: int, num_rollouts: int, groups_per_batch: int, group_size: int) -> None:
        self.rng = rng
        self.harness = LedgerHarness(
            config_with(
                max_lag=max_lag, groups_per_batch=groups_per_batch, group_size=group_size, num_batches=6, lease_s=50.0
            )
        )
        self.rollouts = [SessionKey(f"r{index}", "s") for index in range(num_rollouts)]
        self.versions = dict.fromkeys(self.rollouts, 0)
        self.leases: list[tuple[SessionKey, GrantLease]] = []
        self.version = 1
        self.index = 0
        self.lags: list[int] = []
        self.harness.hello(LEARNER, "learner")
        for sender in self.rollouts:
            self.harness.hello(sender)
        self.harness.publish(1, 0)

    def step(self) -> None:
        action = self.rng.choice(["update", "lease", "lease", "grow", "finish", "finish", "batch", "expire"])
        sender = self.rng.choice(self.rollouts)
        if action == "update":
            self.versions[sender] = self.rng.randint(self.versions[sender], self.version)
        elif action == "lease" and self.versions[sender]:
            grants = self.harness.lease(sender, self.rng.randint(1, 5), self.versions[sender])
            self.leases += [(sender, grant) for grant in grants]
        elif action in ("grow", "finish") and self.leases:
            holder, lease = self.leases[self.rng.randrange(len(self.leases))]
            self.harness.grow(holder, lease, 2, self.versions[holder])
            if action == "finish":
                self.leases.remove((holder, lease))
                row = self.harness.ledger.state.groups.trajectory(lease.trajectory_id)
                if row is not None and row.status == "leased" and row.epoch == lease.epoch:
                    self.harness.finish(holder, lease, row.num_tokens)
        elif action == "expire" and self.rng.random() < 0.05:
            self.harness.tick(30.0)
            for each in self.rollouts:
                # It lives, and has lost its leases.
                self.harness.send(each, Heartbeat(policy_version=self.versions[each], status="serving", leases=[]))
            self.harness.tick(21.0)
        elif action == "batch":
            self.train()

    def train(self) -> None:
        if self.index == self.harness.config.num_batches:
            return
        actions = self.harness.request_batch(self.index, self.version)
        if delivered(actions) == [self.index]:
            batch = self.harness.ledger.state.batches.batch(self.index)
            assert batch is not None
            self.lags.append(batch.stats.max_lag)
            self.harness.trained(self.index, self.version)
            self.index, self.version = self.index + 1, self.version + 1
            self.harness.publish(self.version, self.index)


@settings(max_examples=40, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    max_lag=st.integers(0, 3),
    num_rollouts=st.integers(1, 4),
    groups_per_batch=st.integers(1, 4),
    group_size=st.integers(1, 3),
)
@example(rng=random.Random(0), max_lag=2, num_rollouts=3, groups_per_batch=3, group_size=2)
def test_without_a_learner_crash_nothing_is_dropped_and_no_run_gets_stuck(
    rng: random.Random, max_lag: int, num_rollouts: int, groups_per_batch: int, group_size: int
) -> None:
    fleet = Fleet(rng, max_lag, num_rollouts, groups_per_batch, group_size)
    state = fleet.harness.ledger.state
    for _ in range(200):
        fleet.step()
        assert state.window().is_feasible
    # Whatever the weather was, the fleet can always end the run: engines catch up, episodes finish.
    for _ in range(200):
        if fleet.index == state.config.num_batches:
            break
        for sender in fleet.rollouts:
            fleet.harness.hello(sender)  # It may have been silent for long enough to be forgotten.
            fleet.versions[sender] = fleet.version
            fleet.leases += [(sender, grant) for grant in fleet.harness.lease(sender, 50, fleet.version)]
        for holder, lease in fleet.leases:
            row = state.groups.trajectory(lease.trajectory_id)
            if row is not None and row.status == "leased" and row.epoch == lease.epoch:
                fleet.harness.episode(holder, lease, fleet.versions[holder])
        fleet.leases.clear()
        fleet.train()
    assert fleet.index == state.config.num_batches
    assert max(fleet.lags) <= max_lag
    assert state.num_dropped == {}
    assert state.next_prompt == state.config.num_batches * groups_per_batch, "a prompt was started that no batch needs"


def test_the_window_lets_lag_grow_up_to_the_bound_and_no_further() -> None:
    lags = set()
    for seed in range(12):
        fleet = Fleet(random.Random(seed), max_lag=2, num_rollouts=3, groups_per_batch=2, group_size=2)
        for _ in range(800):
            fleet.step()
        lags |= set(fleet.lags)
    assert lags == {0, 1, 2}
