"""How a group is sampled is decided when it begins, and what a batch is trained with when it is assembled: both for good."""

from dataclasses import dataclass, replace

from msgspec import structs

from gspo_protocol.messages import GroupSampling, Refused, TrainingValues
from gspo_services.broker.outgoing import lease_message
from gspo_services.broker.rows import GroupRow
from gspo_services.broker.sending import recorded_batch
from gspo_services.broker.store import RowChanges
from tests.support.broker.ledger import LedgerHarness, delivered, replies
from tests.support.broker.ledger_training import R1, generate, harness, train_one


@dataclass(frozen=True)
class Doubling:
    """Lengths double with each batch from 8 on; the temperature falls by a tenth, the learning rate counts the batches."""

    rate_per_batch: float = 1.0

    def sampling_at(self, batch: int) -> GroupSampling:
        return GroupSampling(1.0 - batch / 10, 4, 8 * 2**batch, 8 * 2**batch)

    def training_at(self, batch: int) -> TrainingValues:
        return TrainingValues(learning_rate=self.rate_per_batch * (batch + 1))


def groups(world: LedgerHarness) -> dict[int, GroupRow]:
    return {row.group_id: row for row in world.store.contents().groups}


def test_a_group_is_sampled_as_its_batch_demands_although_it_begins_earlier() -> None:
    """Two groups make a batch, and two batches' groups are admitted at once."""
    world = harness(schedules=Doubling(), num_batches=9)
    leases = world.lease(R1, 8, 1)
    assert [lease.sampling.max_tokens for lease in leases] == [8, 8, 8, 8, 16, 16, 16, 16]
    assert {number: row.sampling.max_tokens for number, row in groups(world).items()} == {0: 8, 1: 8, 2: 16, 3: 16}
    for lease in leases:
        world.episode(R1, lease, 1)
    train_one(world, 0, 1)
    assert [lease.sampling.max_tokens for lease in world.lease(R1, 4, 2)] == [32] * 4
    assert [each.max_tokens for each in world.store.batch(0)[0].samplings] == [8, 8]


def test_a_group_has_the_adapter_of_its_task_in_leases_in_the_batch_and_in_the_metrics() -> None:
    world = harness(schedules=Doubling(), num_batches=9, adapter_of=lambda source, index: f"{source}-{index % 2}")
    leases = world.lease(R1, 8, 1)
    expected = {number: f"train-{row.task_index % 2}" for number, row in groups(world).items()}
    assert {lease.group_id: lease.sampling.adapter for lease in leases} == expected
    for lease in leases:
        world.episode(R1, lease, 1)
    train_one(world, 0, 1)
    batch, *_ = world.store.batch(0)
    assert [each.adapter for each in batch.samplings] == [expected[number] for number in batch.group_ids]
    assert set(batch.stats.adapters) == {expected[number] for number in batch.group_ids}
    (line,) = [line for line in world.lines if line["event"] == "batch"]
    assert {f"adapter/{name}/reward" for name in batch.stats.adapters} <= set(line)


def test_a_group_that_replaces_a_dropped_one_is_sampled_for_the_batch_that_now_lacks_one() -> None:
    world = harness(schedules=Doubling(), num_batches=9, max_lag=1)
    leases = world.lease(R1, 8, 1)
    for _ in range(2):
        world.fail(R1, leases[0])
        leases[:1] = world.lease(R1, 1, 1)
    assert 0 not in groups(world)
    # Three groups are under way: the new one is the second of batch 1.
    assert leases[0].sampling.max_tokens == 16


def test_a_group_under_way_keeps_its_sampling_when_the_run_goes_on_with_other_schedules() -> None:
    world = harness(schedules=Doubling(), num_batches=9)
    (lease,) = world.lease(R1, 1, 1)
    world.grow(R1, lease, 5, 1)
    later = replace(world.config, schedules=_Constant(GroupSampling(0.5, 99, 100, 100)))
    world.config = later
    world.restart()
    world.hello(R1._replace(session="b"))
    (again,) = [each for each in world.lease(R1._replace(session="b"), 1, 1) if each.group_id == 0]
    assert again.sampling == lease.sampling == GroupSampling(1.0, 4, 8, 8)
    message, _ = lease_message(again, {}, world.store.payload(again.trajectory_id), [], 1.0)
    assert message.sampling == lease.sampling
    (refused,) = replies(world.grow(R1._replace(session="b"), again, 4, 1), Refused)
    assert "9 tokens, 8 allowed (sampling.max_tokens)" in refused.reason
    # Its other member keeps it too, and a new group gets what is set now.
    rest = world.lease(R1._replace(session="b"), 3, 1)
    assert {each.group_id: each.sampling.max_tokens for each in rest} == {0: 8, 1: 100}


@dataclass(frozen=True)
class _Constant:
    sampling: GroupSampling

    def sampling_at(self, batch: int) -> GroupSampling:
        return self.sampling

    def training_at(self, batch: int) -> TrainingValues:
        return TrainingValues()


def test_a_batch_keeps_what_it_is_trained_with_and_each_trajectory_its_temperature() -> None:
    world = harness(schedules=Doubling(), num_batches=9)
    generate(world, 8, 1)
    train_one(world, 0, 1)
    world.request_batch(1, 2)
    row = world.store.batch_row(1)
    world.config = replace(world.config, schedules=Doubling(rate_per_batch=7.0))
    world.restart()
    assert world.store.batch_row(1) == row
    message, _ = recorded_batch(world.store, 1, part_tokens=8).announcement()
    assert message.values == TrainingValues(learning_rate=2.0)
    assert [(item.temperature, item.max_tokens) for item in message.items] == [(0.9, 16)] * 4
    # Groups from before and after a change may share a batch.
    mixed = structs.replace(row, samplings=(GroupSampling(0.9, 4, 16, 16), GroupSampling(0.8, 4, 32, 32)))
    world.store.commit(RowChanges(rows=[mixed]))
    message, _ = recorded_batch(world.store, 1, part_tokens=8).announcement()
    assert [(item.temperature, item.max_tokens) for item in message.items] == [(0.9, 16)] * 2 + [(0.8, 32)] * 2


def test_the_line_of_a_batch_says_how_it_was_sampled() -> None:
    world = harness(schedules=Doubling(), num_batches=9)
    generate(world, 8, 1)
    train_one(world, 0, 1)
    assert delivered(world.request_batch(1, 2)) == [1]
    world.trained(1, 2)
    lines = [line for line in world.lines if line["event"] == "batch"]
    assert [(line["sampling/max_tokens"], line["sampling/temperature"]) for line in lines] == [(8, 1.0), (16, 0.9)]
    assert "clip/eps_low" not in lines[0]


def test_held_out_tasks_are_sampled_as_training_is_at_that_batch() -> None:
    world = harness(schedules=Doubling(), num_batches=9, evaluate_every_batches=2, num_eval_tasks=1)
    for index in range(2):
        for lease in world.lease(R1, 5, index + 1):
            world.episode(R1, lease, index + 1)
        train_one(world, index, index + 1)
    held_out = [row for row in groups(world).values() if row.split == "eval"]
    assert [row.sampling.max_tokens for row in held_out] == [32]
