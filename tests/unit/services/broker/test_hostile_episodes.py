"""Whatever of an episode the broker takes, the learner can train, SQLite can store, and every message can carry."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.moe.experts import ExpertShape
from gspo.settings import Objective
from gspo_protocol.codec import decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import Batch, BatchPart, Published, Refused, Status
from gspo_protocol.messages.experts import ModelExperts, decode_experts
from gspo_services.broker.ledger import LedgerConfig
from gspo_services.broker.ledger.actions import AppendChunk, SessionKey
from gspo_services.broker.outgoing import grade_message, lease_message
from gspo_services.broker.sending import recorded_batch
from gspo_services.broker.sessions import token_facts
from gspo_services.learner.advantages import AdvantageSettings
from gspo_services.learner.broker.assembly import Assembly
from tests.support.broker.hostile import HostileRollout
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with, delivered, replies
from tests.support.broker.made_batches import all_rows
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import train

VOCABULARY = 16
EXPERTS = ModelExperts(num_layers=2, top_k=2, num_experts=4)
NEWEST = 3
R = SessionKey("hostile", "s")
H = SessionKey("honest", "s")
CONFIG: LedgerConfig = config_with(groups_per_batch=1, group_size=3, max_lag=2, max_attempts=10**6, failure_budget=10**6)
OBJECTIVES = (
    Objective(),
    replace(Objective.grpo(), anchor="behaviour"),
    Objective(ratio_unit="turn", anchor="behaviour", noise_z=3.0),
    Objective(anchor="proximal", tis_mode="reject"),
)
SEEN: Counter[str] = Counter()


class Intake:
    """A hostile rollout, a broker and a learner, joined by the codec."""

    def __init__(self, rng: random.Random, oddity: float) -> None:
        self.rng = rng
        self.world = LedgerHarness(replace(CONFIG, grades_groups=rng.random() < 0.5))
        self.world.hello(LEARNER, "learner")
        self.world.hello(R)
        self.world.hello(H)
        for version in range(1, NEWEST + 1):
            self.world.send(
                LEARNER,
                Published(
                    policy_version=version, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0,
                    vocabulary=VOCABULARY, experts=EXPERTS,
                ),
            )  # fmt: skip
        self.hostile = HostileRollout(rng, VOCABULARY, NEWEST, oddity, EXPERTS)
        self.honest = HostileRollout(rng, VOCABULARY, NEWEST, 0.0, EXPERTS)
        self.seq = Counter[SessionKey]()

    def hand_in(self, sender: SessionKey, frames: list[bytes]) -> None:
        try:
            received = decode(frames)
        except ProtocolError:
            SEEN["no message"] += 1
            return
        self.seq[sender] += 1
        facts = token_facts(received)
        actions = self.world.ledger.on_message(sender, received.message, received.seq, self.world.now, facts)
        refused = replies(actions, Refused)
        SEEN["refused" if refused else "taken"] += 1
        # A real one would see this before it sends, and give the episode up.
        assert sender != H or all("MAX_REWARD" in each.reason for each in refused), refused
        if "experts" in received.arrays and any(isinstance(each, AppendChunk) for each in actions):
            # Many batches would be needed until every kind of them is in one.
            taken = torch.from_numpy(decode_experts(received.arrays["experts"]))
            ExpertShape(*msgspec.structs.astuple(EXPERTS)).require(taken)
        self.world._carry_out(actions, received.arrays)

    def play(self, sender: SessionKey, steps: int) -> None:
        """Lease, send, finish."""
        rollout = self.hostile if sender == R else self.honest
        for _ in range(steps):
            held = [row for row in self.world.ledger.state.groups.leased() if row.holder_peer == sender.peer]
            if not held or self.rng.random() < 0.1:
                self._resume(sender)
                continue
            row = self.rng.choice(held)
            ends = row.num_action_tokens > 0 and (self.rng.random() < 0.3 or row.num_tokens > 50)
            if row.awaits_grade and self.rng.random() < 0.9:
                SEEN["graded"] += 1
                self.hand_in(sender, rollout.graded(row, CONFIG.group_size, self.seq[sender]))
                continue
            if row.awaits_grade and sender == H:
                continue
            make = rollout.finish if ends else rollout.chunk
            self.hand_in(sender, make(row, self.seq[sender]))

    def _resume(self, sender: SessionKey) -> None:
        """Every lease can be read by the rollout that gets it, with what others have left in it."""
        for grant in self.world.lease(sender, self.rng.randint(1, 3), self.rng.randint(1, NEWEST)):
            payload = self.world.store.payload(grant.trajectory_id)
            if grant.members:
                payloads = [self.world.store.payload(row.trajectory_id) for row in grant.members]
                grade, arrays = grade_message(grant, {"task": 1}, payloads)
                assert decode(encode(grade, arrays)).message == grade
                continue
            message, arrays = lease_message(grant, {"task": 1}, payload, self.world.store.journal(grant.trajectory_id), 10.0)
            received = decode(encode(message, arrays))
            SEEN["resumed"] += bool(payload.num_tokens)
            assert received.message == message or "nan" in repr(message)

    def train(self) -> bool:
        """Train a batch, if there is one, with every objective."""
        if not delivered(self.world.request_batch(0, NEWEST)):
            return False
        _, items = self.world.store.batch(0)
        part_tokens = self.rng.choice([1, 7, 2**18])
        recorded = recorded_batch(self.world.store, 0, part_tokens=part_tokens, with_experts=True)
        received = decode(encode(*recorded.announcement()))
        assert isinstance(received.message, Batch)
        chosen = self.rng.choice(OBJECTIVES)
        assembly = Assembly(received.message, received.arrays, all_rows)
        for number in range(recorded.num_parts):
            part = decode(encode(*recorded.part(number)))
            assert isinstance(part.message, BatchPart)
            assembly.add(part.message, part.arrays)
        groups = assembly.assembled().groups
        loaded = [member.loaded().experts for each in groups for member in each.sequences]
        SEEN["trained with experts"] += sum(experts is not None for experts in loaded)
        for credit in (AdvantageSettings(), AdvantageSettings(advantage="turn", normalise_by_std=False)):
            engine = BigramEngine(VOCABULARY)
            version, max_lag = received.message.policy_version, CONFIG.max_lag
            report = train(engine, groups, chosen, policy_version=version, max_lag=max_lag, advantages=credit)
            assert all(math.isfinite(value) for value in report.metrics.values()), report.metrics
            assert bool(torch.isfinite(engine.table).all())
        self.world.trained(0, NEWEST)
        SEEN["trained"] += 1
        SEEN["trained less than was sampled"] += any(row.discarded_turns for row, _ in items)
        for trajectory, payload in items:
            sampled = sum(segment.num_tokens for segment in payload.segments if segment.kind == "action")
            assert sampled == trajectory.num_action_tokens
        trained = sum(member.num_action_tokens for each in groups for member in each.sequences)
        assert trained == sum(
            segment.num_tokens
            for trajectory, payload in items
            for segment in payload.segments
            if segment.kind == "action" and segment.turn not in trajectory.discarded_turns
        )
        SEEN["trained several sequences"] += any(len(each.sequences) > each.num_episodes for each in groups)
        return True

    def check(self) -> None:
        """The run can be shown, read again and written down."""
        world = self.world
        status = Status(status=world.ledger.status(world.now))
        assert decode(encode(status)).message == status
        restored: Any = world.restored()
        assert restored.status(world.now)["groups"] == world.ledger.status(world.now)["groups"]
        for line in world.store.metrics_after(0):
            json.dumps(line, allow_nan=False)


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), oddity=st.sampled_from([0.01, 0.03, 0.1]))
def test_whatever_is_taken_can_be_trained_stored_and_said(seed: int, oddity: float) -> None:
    intake = Intake(random.Random(seed), oddity)
    intake.play(R, 60)
    intake.world.tick(11.0)
    intake.play(H, 60)  # An honest rollout goes on with what the hostile one has left.
    intake.train()
    intake.check()


def test_much_was_refused_and_much_was_taken() -> None:
    """Otherwise the test above says little."""
    assert SEEN["no message"] > 5
    assert SEEN["refused"] > 5
    assert SEEN["taken"] > 5
    assert SEEN["resumed"] > 5
    assert SEEN["graded"] > 5
    assert SEEN["trained"] > 5
    assert SEEN["trained several sequences"] > 2
    assert SEEN["trained with experts"] > 5
    assert SEEN["trained less than was sampled"] > 2
