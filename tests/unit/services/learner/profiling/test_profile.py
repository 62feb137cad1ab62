"""The phases of a batch add up to its time, on one rank and on two, without a wait for the device."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from gspo.model.packing import TrainSequence, pack
from gspo.settings import Objective
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.profiling.flops import ModelCost, model_cost, peak_tflops
from gspo_services.learner.profiling.profile import (
    NO_PROFILE,
    PHASES,
    BatchProfile,
    DeviceTimeline,
    HostTimeline,
    PlannedWork,
    StepProfile,
)
from gspo_services.learner.profiling.report import LINES_FILE, TABLE_FILE, ProfileFiles, table
from gspo_services.learner.service import LearnerService
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import BatchSection, Learner, ObjectiveSettings, Run, Settings
from tests.support.clocks import VirtualClock
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.scripted_broker import ScriptedBroker
from tests.support.learner.serving_bigram import ServingBigram
from tests.support.learner.trained import train
from tests.support.loss.sequences import random_groups

COST = ModelCost(active_parameters=1000, attention_width=10)


def sequences() -> list[TrainSequence]:
    return sequences_with_advantages(random_groups(2, 3, seed=4), AdvantageSettings())[0]


def a_profile(
    clock: VirtualClock, reports: list[BatchProfile], *, rank: int = 0, world_size: int = 1, peak_flops: float | None = None
) -> StepProfile:
    return StepProfile(
        HostTimeline(clock),
        rank=rank,
        world_size=world_size,
        max_tokens_per_micro_batch=50,
        cost=COST,
        peak_flops=peak_flops,
        report=reports.append,
    )


def live_through(profile: StepProfile, clock: VirtualClock, *, forward_s: float, chosen: Sequence[int]) -> None:
    """One batch: 2 s of waiting, preparation, ``forward_s`` of forward in 5 s, half a second of which is a first pass's."""
    members = sequences()
    with profile.phase("wait"):
        clock.advance(2.0)
    with profile.phase("prepare"):
        clock.advance(0.25)
    packed = pack([members[index] for index in chosen], policy_version=5)
    lengths = [member.num_tokens for member in members]
    profile.planned(
        PlannedWork(
            lengths=lengths, still_lengths=lengths[:1], own_tokens=packed.num_tokens, num_micro_batches=2, first_pass=True
        )
    )
    clock.advance(0.125)
    with profile.phase("first_pass"):
        clock.advance(0.5)
        with profile.phase("forward"):
            clock.advance(forward_s)
        clock.advance(0.5)


def test_a_moment_belongs_to_the_innermost_phase_and_all_add_up_to_the_batch() -> None:
    clock, reports = VirtualClock(), []
    profile = a_profile(clock, reports, peak_flops=1e6)
    live_through(profile, clock, forward_s=4.0, chosen=range(6))
    profile.end_batch(7, Tensor.clone)
    (batch,) = reports
    expected = {"wait": 2.0, "prepare": 0.25, "other": 0.125, "first_pass": 1.0, "forward": 4.0}
    assert batch.seconds == dict.fromkeys(PHASES, 0.0) | expected
    assert (batch.batch, batch.total_s, batch.compute_s) == (7, 7.375, 5.0)
    lengths = [sequence.num_tokens for sequence in sequences()]
    assert batch.tokens == batch.rank_tokens[0] == sum(lengths)
    assert batch.num_micro_batches == 2
    assert batch.packing_efficiency == sum(lengths) / 100
    assert batch.padding_efficiency == sum(lengths) / (6 * max(lengths))
    # Three forward passes' worth for training, one for the first pass; 2 L^2 pairs by ten numbers of attention.
    of_each = [2 * 1000 * length + 2 * 10 * length**2 for length in lengths]
    assert batch.flops == 4 * sum(of_each) - 2 * of_each[0], "the first gets no backward pass"
    assert batch.mfu == pytest.approx(batch.flops / 5.0 / 1e6)


def test_a_second_batch_begins_where_the_first_ended() -> None:
    clock, reports = VirtualClock(), []
    profile = a_profile(clock, reports)
    clock.advance(3.0)
    profile.end_batch(0, Tensor.clone)
    with profile.phase("export"):
        clock.advance(1.5)
    profile.end_batch(1, Tensor.clone)
    assert [batch.total_s for batch in reports] == [3.0, 1.5]
    assert reports[1].seconds["export"] == 1.5
    assert reports[0].mfu is None


def test_two_ranks_report_the_same_and_their_imbalance() -> None:
    tables: list[Tensor] = []
    for rank, (forward_s, chosen) in enumerate(((1.0, range(5)), (3.0, range(5, 6)))):
        clock = VirtualClock()
        profile = a_profile(clock, [], rank=rank, world_size=2)
        live_through(profile, clock, forward_s=forward_s, chosen=chosen)

        def keep(own: Tensor) -> Tensor:
            tables.append(own)
            return own

        profile.end_batch(0, keep)
    reports: list[BatchProfile] = []
    for rank, (forward_s, chosen) in enumerate(((1.0, range(5)), (3.0, range(5, 6)))):
        clock = VirtualClock()
        profile = a_profile(clock, reports, rank=rank, world_size=2)
        live_through(profile, clock, forward_s=forward_s, chosen=chosen)
        profile.end_batch(0, lambda own: tables[0] + tables[1])
    first, second = reports
    assert first == second
    assert first.seconds["forward"] == 2.0
    assert first.slowest["forward"] == 3.0
    assert first.total_s == pytest.approx(2.0 + 0.25 + 0.125 + 1.0 + 2.0)
    lengths = [sequence.num_tokens for sequence in sequences()]
    assert first.rank_tokens == [sum(lengths[:5]), lengths[5]]
    assert first.imbalance == pytest.approx(2 * sum(lengths[:5]) / sum(lengths))
    assert first.packing_efficiency == sum(lengths) / (2 * 2 * 50)


class ScriptedEvent:
    """A CUDA event that the device passes a quarter of a second after the one before."""

    def __init__(self, events: list[ScriptedEvent]) -> None:
        self.synchronized = 0
        self._events = events

    def record(self) -> None:
        self._events.append(self)

    def synchronize(self) -> None:
        self.synchronized += 1

    def elapsed_time(self, other: ScriptedEvent) -> float:
        return 250.0 * (self._events.index(other) - self._events.index(self))


def test_on_a_device_only_the_end_of_the_batch_waits_and_only_for_the_last_event() -> None:
    events: list[ScriptedEvent] = []
    reports: list[BatchProfile] = []
    timeline = DeviceTimeline(lambda: ScriptedEvent(events))  # type: ignore[arg-type,return-value]
    profile = StepProfile(
        timeline, rank=0, world_size=1, max_tokens_per_micro_batch=50, cost=COST, peak_flops=None, report=reports.append
    )
    for _ in range(3):
        with profile.phase("forward"):
            pass
        with profile.phase("backward"):
            pass
    assert sum(event.synchronized for event in events) == 0
    profile.end_batch(0, Tensor.clone)
    assert [event.synchronized for event in events] == [0] * 13 + [1]
    assert reports[0].seconds["forward"] == reports[0].seconds["backward"] == 0.75
    assert reports[0].total_s == 0.25 * 13


def test_without_a_profile_nothing_is_measured_and_no_collective_is_entered() -> None:
    def never(_: Tensor) -> Tensor:
        raise AssertionError("a collective")

    assert NO_PROFILE.phase("forward") is NO_PROFILE.phase("wait")
    NO_PROFILE.end_batch(0, never)


def test_the_files_hold_a_line_per_batch_and_the_table_of_all(tmp_path: Path) -> None:
    clock, reports = VirtualClock(), []
    profile = a_profile(clock, reports, peak_flops=1e6)
    files = ProfileFiles(tmp_path / "run")
    for index, forward_s in enumerate((4.0, 2.0)):
        live_through(profile, clock, forward_s=forward_s, chosen=range(6))
        profile.end_batch(index, Tensor.clone)
        files.add(reports[-1])
    files.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / LINES_FILE).read_text().splitlines()]
    assert [line["batch"] for line in lines] == [0, 1]
    assert [line["seconds"]["forward"] for line in lines] == [4.0, 2.0]
    assert lines[0]["tokens_per_s"] == lines[0]["tokens"] / 7.375
    text = (tmp_path / "run" / TABLE_FILE).read_text().splitlines()
    assert text == table(reports)
    assert "| forward | 3.0000 | 3.0000 | 47.1% |" in text
    assert "| all | 6.3750 | | 100.0% |" in text
    tokens = reports[0].tokens
    assert f"| tokens/s, while tokens are trained | {2 * tokens / 8.0:,.0f} |" in text
    assert f"| MFU, of 1e-06 TFLOP/s | {2 * reports[0].flops / 8.0 / 1e6:.1%} |" in text


def test_only_the_chosen_experts_of_a_mixture_are_active_and_the_input_embedding_does_not_count() -> None:
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.self_attn.q_proj.weight": (16, 8),
        "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.experts.gate_up_proj": (4, 12, 8),
        "lm_head.weight": (100, 8),
    }
    config = {
        "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2, "head_dim": 8, "num_hidden_layers": 1,
        "hidden_size": 8,
    }  # fmt: skip
    assert model_cost(shapes, config) == ModelCost(16 * 8 + 4 * 8 + 4 * 12 * 8 // 2 + 100 * 8, 16)
    tied = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    assert model_cost(tied, config).active_parameters == model_cost(shapes, config).active_parameters
    dense = {"model.layers.0.mlp.up_proj.weight": (12, 8), "lm_head.weight": (100, 8)}
    assert model_cost(dense, {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}) == ModelCost(896, 24)


def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all() -> None:
    assert peak_tflops("NVIDIA H200") == 989.0
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("Some Other Card") is None


def test_the_trainer_reports_the_phases_and_tokens_of_a_batch() -> None:
    torch.set_num_threads(1)
    reports: list[BatchProfile] = []
    engine = BigramEngine()
    profile = StepProfile(
        HostTimeline(MonotonicClock()),
        rank=0,
        world_size=1,
        max_tokens_per_micro_batch=engine.max_tokens_per_micro_batch,
        cost=COST,
        peak_flops=None,
        report=reports.append,
    )
    groups = random_groups(4, 3, seed=1)
    engine.profile = profile
    report = train(engine, groups, Objective(anchor="proximal"), num_mini_batches=2)
    profile.end_batch(0, engine.sum_over_ranks)
    assert reports[0].tokens == report.metrics["packed_tokens"] == reports[0].rank_tokens[0]
    assert reports[0].num_micro_batches == engine.num_forward_passes > 2
    assert all(reports[0].seconds[phase] > 0 for phase in ("prepare", "first_pass", "diagnostics"))


def test_the_learner_reports_every_phase_of_a_batch_but_those_of_deepspeed(tmp_path: Path) -> None:
    settings = Settings(
        run=Run(directory=tmp_path),
        batch=BatchSection(group_size=2, groups_per_batch=4, mini_batches=2),
        learner=Learner(checkpoint_every_batches=1),
        objective=ObjectiveSettings(anchor="proximal"),
    )
    clock, stop, reports = MonotonicClock(), threading.Event(), []
    engine = ServingBigram()
    profile = StepProfile(
        HostTimeline(clock),
        rank=0,
        world_size=1,
        max_tokens_per_micro_batch=engine.max_tokens_per_micro_batch,
        cost=COST,
        peak_flops=None,
        report=reports.append,
    )
    engine.profile = profile
    LearnerService(
        settings,
        engine,  # type: ignore[arg-type]
        ScriptedBroker(stop, num_batches=1),
        clock=clock,
        health=Health(clock, 60.0),
        metrics=LearnerMetrics(CollectorRegistry()),
        stop=stop,
        profile=profile,
    ).run()
    (batch,) = reports
    assert (batch.batch, batch.tokens) == (0, 48)
    untimed = {phase for phase, seconds in batch.seconds.items() if seconds == 0}
    assert untimed == {"forward", "loss", "backward", "optimizer"}
