"""What the learner tells brokers of its model's experts."""

from types import SimpleNamespace

import pytest

from gspo.moe.experts import ExpertShape
from gspo_protocol.messages.experts import ModelExperts
from gspo_services.learner.engine import LearnerEngine
from gspo_services.shared.weights import reported_experts
from tests.support.learner.tiny_model import tiny_qwen3_moe


def told(shape: ExpertShape | None) -> ModelExperts | None:
    found: ModelExperts | None = LearnerEngine.model_experts.fget(SimpleNamespace(engine_experts=shape))  # type: ignore[attr-defined]
    return found


def test_the_learner_tells_of_its_model_what_a_rollout_takes_from_the_engine() -> None:
    model = tiny_qwen3_moe()
    assert told(ExpertShape.of(model)) == reported_experts(model.config.to_dict())


@pytest.mark.parametrize("shape", [None, ExpertShape(2, 0, 4), ExpertShape(60, 10, 512)])
def test_nothing_is_told_where_nothing_is_replayed_or_no_engine_could_report_it(shape: ExpertShape | None) -> None:
    assert told(shape) is None
