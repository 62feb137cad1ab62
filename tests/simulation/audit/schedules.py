"""Members of a group are sampled alike, and a batch is trained with what was recorded, whatever the schedules say then."""
# ruff: noqa: B023 - the text of a violation is made at once

from gspo_protocol.messages import Batch, GroupSampling, Lease
from gspo_services.rollout.sglang.generation import GenerateRequest
from tests.simulation.audit.books import Books

ALIKE = "schedules: a group is sampled alike"
RECORDED = "schedules: a batch is trained with what was recorded"


class ScheduleAudit(Books):
    """Hears how tokens are asked for, and what batches are trained with."""

    def leased_to_sample(self, lease: Lease) -> None:
        """A lease is sent."""
        row = self.durable.groups.get(lease.group_id)
        self.require(
            row is not None and row.sampling == lease.sampling,
            ALIKE,
            lambda: f"trajectory {lease.trajectory_id} is leased with {lease.sampling}, on disk is {row}",
        )
        self.samplings[lease.trajectory_id, lease.epoch] = lease.sampling

    def asked_to_sample(self, trajectory_id: int, epoch: int, request: GenerateRequest) -> None:
        """An engine is asked for tokens under a lease."""
        wanted, asked = self.samplings[trajectory_id, epoch], request.sampling
        num_tokens = len(request.input_ids) + asked.max_new_tokens
        self.happened["sampled at another temperature"] += asked.temperature != 1.0
        self.require(
            asked.temperature == wanted.temperature
            and asked.max_new_tokens <= wanted.max_turn_tokens
            and num_tokens <= wanted.max_tokens,
            ALIKE,
            lambda: f"trajectory {trajectory_id} asks for {asked} after {len(request.input_ids)} tokens, {wanted} holds",
        )

    def trains_with(self, batch: Batch, learning_rate: float, own_rate: float) -> None:
        """A learner trains a batch; ``own_rate`` is that of its settings."""
        row = self.durable.batches[batch.index]
        recorded = own_rate if row.values.learning_rate is None else row.values.learning_rate
        self.require(
            learning_rate == recorded,
            RECORDED,
            lambda: f"batch {batch.index} is trained at {learning_rate:g}, recorded is {recorded:g}",
        )
        for item in batch.items:
            sampling: GroupSampling = self.durable.groups[item.group_id].sampling
            self.require(
                (item.temperature, item.max_tokens) == (sampling.temperature, sampling.max_tokens),
                RECORDED,
                lambda: f"trajectory {item.trajectory_id} comes with {item.temperature:g}, it was sampled with {sampling}",
            )
