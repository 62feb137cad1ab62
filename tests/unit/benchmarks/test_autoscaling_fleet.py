"""The simulated fleet: closed forms, conservation, the broker's bound, and planted bugs that these tests find."""

import statistics
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.autoscaling.config import Config, Lengths, Spot
from benchmarks.autoscaling.engine import Engine, Group, Trajectory
from benchmarks.autoscaling.fleet import Fleet
from benchmarks.autoscaling.ledger import Ledger
from gspo_services.broker.ledger.admission import Admission, Window

EVEN = Config(
    group_size=4,
    groups_per_batch=1,
    max_lag=1,
    step_s=10.0,
    step_sigma=0.0,
    fetch_s=0.0,
    pause_s=0.0,
    max_running=4,
    tokens_per_s=100.0,
    stream_tokens_per_s=50.0,
    start_s=(30.0, 30.0),
    lengths=Lengths(mean=500.0, sigma=0.0),
)
"""One group at a time on one rollout: 500 tokens at 100 / 4 tokens a second are 20 s."""
STORMY = Config(
    groups_per_batch=4,
    max_lag=2,
    step_s=20.0,
    lengths=Lengths(mean=300.0, tail_share=0.05, most=6000),
    spot=Spot(per_hour=4.0, mass_at_s=1800.0, mass_share=0.5),
    start_s=(20.0, 60.0),
)


def times(config: Config, seconds: float, replicas: int = 1) -> list[float]:
    """Return the times at which batches were assembled."""
    fleet = Fleet(config, replicas=replicas, seed=0)
    fleet.run_until(seconds)
    return [batch.at for batch in fleet.batches]


def check(fleet: Fleet) -> None:
    """Nothing is lost, nothing is trained twice, and nothing is older than allowed."""
    config, ledger = fleet.config, fleet.ledger
    batched = [group_id for batch in fleet.batches for group_id in batch.group_ids]
    in_play = {trajectory.group.group_id for trajectory in ledger.trajectories()}
    assert len(set(batched)) == len(batched)
    assert not set(batched) & in_play
    assert set(batched) | in_play == set(range(len(batched) + len(in_play)))
    assert all(batch.largest_lag <= config.max_lag for batch in fleet.batches)
    assert all(-1e-9 < batch.mean_lag < batch.largest_lag + 1e-9 for batch in fleet.batches)
    made = fleet.tokens_made()
    counted = sum(batch.num_tokens for batch in fleet.batches) + sum(t.done for t in ledger.trajectories())
    assert made == pytest.approx(counted + fleet.tokens_in_flight() + fleet.tokens_lost, rel=1e-6, abs=1e-3)
    held = ledger.num_free + fleet.num_running + fleet.num_expiring
    assert held == sum(not trajectory.finished for trajectory in ledger.trajectories())
    assert ledger.counts_right()
    assert ledger.num_free == sum(len(group.free) for group in {t.group for t in ledger.trajectories()})


def test_a_rollout_that_is_slower_than_the_learner_sets_the_pace() -> None:
    # Served at 30 s, then a group each 20 s; the learner trains for 10 s and waits for 10 s.
    assert times(EVEN, 130.0) == pytest.approx([50.0, 70.0, 90.0, 110.0, 130.0])
    fleet = Fleet(EVEN, replicas=1, seed=0)
    fleet.run_until(1030.0)
    assert fleet.wait_s() == pytest.approx(50.0 + 49 * 10.0)
    # Versions 1, 1, 2, 3: each group begins while the version of the one before it is being trained.
    assert [batch.mean_lag for batch in fleet.batches[:4]] == pytest.approx([0.0, 0.5, 0.5, 0.5])


def test_a_learner_that_is_slower_than_the_rollout_sets_the_pace_and_lag_grows_to_its_bound() -> None:
    slow = replace(EVEN, step_s=25.0)
    assert times(slow, 130.0) == pytest.approx([50.0, 75.0, 100.0, 125.0])
    fleet = Fleet(slow, replicas=1, seed=0)
    fleet.run_until(2000.0)
    assert fleet.wait_s() == pytest.approx(50.0)
    assert fleet.batches[-1].largest_lag == 1
    # A group begins when a batch leaves the window and has that batch's version throughout: one version old at its use.
    assert fleet.batches[-1].mean_lag == pytest.approx(1.0)


def test_without_lag_generation_and_training_take_turns() -> None:
    # 20 s of generation, 10 s of training, 2 s of loading.
    assert times(replace(EVEN, max_lag=0, pause_s=2.0), 120.0) == pytest.approx([50.0, 82.0, 114.0])


def test_few_episodes_are_no_faster_than_one_alone() -> None:
    # Two of 500 tokens on a rollout of 1,000 tokens a second: 50 tokens a second each.
    pair = replace(EVEN, group_size=2, tokens_per_s=1000.0)
    assert times(pair, 55.0) == pytest.approx([40.0, 50.0])


def test_two_rollouts_halve_the_time_of_a_batch_of_two_groups() -> None:
    two = replace(EVEN, groups_per_batch=2)
    assert times(two, 150.0)[0] == pytest.approx(70.0)
    assert times(two, 150.0, replicas=2)[0] == pytest.approx(50.0)


def test_an_episode_that_meets_three_versions_has_the_mean_of_its_tokens_versions() -> None:
    engine = Engine(0.0, 1, total=100.0, stream=10.0)
    trajectory = Trajectory(0, Group(0, 1), 100.0)
    engine.add(trajectory)
    assert engine.next_end() == 10.0
    for at, version in ((2.0, 2), (7.0, 3)):
        engine.advance(at)
        engine.version = version
    engine.advance(10.0)
    assert engine.take_finished() == [trajectory]
    assert trajectory.version_sum == pytest.approx(20 * 1 + 50 * 2 + 30 * 3)


def test_without_a_notice_what_is_in_no_whole_chunk_is_made_again() -> None:
    losing = replace(EVEN, max_lag=4, chunk_tokens=64, lease_s=30.0, spot=Spot(mass_at_s=40.0, mass_share=1.0))
    fleet = Fleet(losing, replicas=1, seed=0)
    fleet.run_until(200.0)
    # Lost at 40 s with 4 * 250 tokens, of which 4 * 192 count. Its successor serves at 70 s, when the leases end, too.
    assert fleet.tokens_lost == pytest.approx(4 * 58.0)
    assert fleet.batches[0].at == pytest.approx(70.0 + (500 - 192) * 4 / 100)
    check(fleet)


def test_with_a_notice_nothing_is_made_again() -> None:
    fleet = Fleet(replace(STORMY, spot=Spot(per_hour=20.0, notice_share=1.0)), replicas=6, seed=1)
    fleet.run_until(3600.0)
    assert fleet.num_lost > 50
    # But the token that each was about to make.
    assert fleet.tokens_lost < fleet.num_lost * STORMY.max_running
    check(fleet)


@given(
    seed=st.integers(0, 10**6),
    max_lag=st.integers(0, 4),
    groups=st.integers(1, 6),
    room=st.integers(1, 20),
    loss=st.sampled_from([0.0, 6.0, 40.0]),
)
@settings(max_examples=25, deadline=None)
def test_in_all_weathers_each_group_is_trained_once_and_none_is_too_old(
    seed: int, max_lag: int, groups: int, room: int, loss: float
) -> None:
    spot = replace(STORMY.spot, per_hour=loss)
    config = replace(STORMY, max_lag=max_lag, groups_per_batch=groups, max_running=room, spot=spot)
    fleet = Fleet(config, replicas=5, seed=seed)
    for end, replicas in ((600.0, 9), (1200.0, 2), (1900.0, 6), (2700.0, 1)):
        fleet.run_until(end)
        check(fleet)
        fleet.scale(replicas)
    assert fleet.num_lost > 0
    assert fleet.batches


def test_a_run_is_the_same_again_and_another_with_another_seed() -> None:
    def ends(seed: int) -> list[float]:
        fleet = Fleet(STORMY, replicas=5, seed=seed)
        fleet.run_until(1200.0)
        return [batch.at for batch in fleet.batches]

    assert ends(3) == ends(3)
    assert ends(3) != ends(4)


def test_pods_that_do_not_serve_yet_go_first() -> None:
    fleet = Fleet(EVEN, replicas=3, seed=0)
    fleet.run_until(31.0)
    fleet.scale(6)
    assert (fleet.replicas, fleet.num_serving) == (6, 3)
    fleet.scale(3)
    fleet.run_until(100.0)
    assert (fleet.replicas, fleet.num_serving) == (3, 3)
    assert fleet.pod_s() == pytest.approx(300.0)


def test_lengths_have_the_mean_that_they_should_and_a_tail() -> None:
    rng = np.random.default_rng(0)
    assert Lengths(mean=1000.0, sigma=0.8, most=10**9).draw(rng, 400_000).mean() == pytest.approx(1000.0, rel=0.02)
    assert Lengths(mean=1000.0, pareto=3.0, most=10**9).draw(rng, 400_000).mean() == pytest.approx(1000.0, rel=0.02)
    tailed = Lengths(mean=1000.0, sigma=0.0, tail_share=0.1, tail_factor=10.0, most=10**9)
    assert tailed.expected() == pytest.approx(0.9 * 1000 + 0.1 * 10_000, rel=0.01)
    assert Lengths(mean=1000.0, sigma=2.0, most=4096).draw(rng, 10_000).max() == 4096


def test_the_fluid_size_is_where_the_wait_ends() -> None:
    config = Config(groups_per_batch=8, max_lag=6, lengths=Lengths(mean=1000.0, sigma=0.3))
    size = config.fluid_size()

    def waiting(replicas: int) -> float:
        fleet = Fleet(config, replicas=replicas, seed=0)
        fleet.run_until(1200.0)
        before = fleet.wait_s()
        fleet.run_until(4800.0)
        return (fleet.wait_s() - before) / 3600

    assert 4 < size < 5
    assert waiting(5) < 0.02
    # Two of 4.4 rollouts: the learner trains in that share of its time.
    assert waiting(2) == pytest.approx(1 - 2 / size, abs=0.03)
    assert statistics.fmean([waiting(3), waiting(4)]) == pytest.approx(1 - 3.5 / size, abs=0.05)


class LeasesTwice(Ledger):
    def _lease(self, group: Group, version: int) -> Trajectory:
        trajectory = super()._lease(group, version)
        if trajectory.trajectory_id == 40:
            group.free.insert(0, trajectory)
            self.num_free += 1
        return trajectory


class ForgetsOneThatWasReleased(Ledger):
    def release(self, trajectories: Iterable[Trajectory]) -> None:
        super().release([trajectory for trajectory in trajectories if trajectory.trajectory_id % 7])


class TrainsAGroupAgain(Ledger):
    def take_batch(self) -> list[Group]:
        batch = super().take_batch()
        if batch and self.next_version % 5 == 0:
            self._groups[batch[0].group_id] = batch[0]
            self.num_complete += 1
        return batch


class PassesOverWhatIsDue(Ledger):
    def take_batch(self) -> list[Group]:
        batch = super().take_batch()
        complete = [group for group in self._groups.values() if group.complete]
        if not batch and self.due:
            batch = complete[: self._config.groups_per_batch]
            for group in batch:
                del self._groups[group.group_id]
            self.num_complete -= len(batch)
            self.next_version += 1
            self._window = self._count()
        return batch


class StartsWhatItLikes(Ledger):
    def _count(self) -> Window:
        return Window(Admission(max_lag=self._config.max_lag, groups_per_batch=1000), (), version=self.next_version)

    def counts_right(self) -> bool:
        return True


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "bug", [LeasesTwice, ForgetsOneThatWasReleased, TrainsAGroupAgain, PassesOverWhatIsDue, StartsWhatItLikes]
)
def test_a_planted_bug_is_found(bug: type[Ledger]) -> None:
    config = replace(STORMY, max_lag=1, group_size=8)

    def play(kind: type[Ledger]) -> None:
        fleet = Fleet(config, replicas=6, seed=0)
        fleet.ledger = kind(config, fleet.length)
        for end in range(100, 2200, 100):
            fleet.run_until(float(end))
            check(fleet)

    play(Ledger)
    with pytest.raises(AssertionError):
        play(bug)
