"""What the learner says at its start about memory."""

from structlog.testing import capture_logs

from gspo_services.learner.start import log_expected_memory
from gspo_services.shared.estimates import memory_rows, shape_of
from gspo_services.shared.settings import Settings
from tests.support.checking.shapes import QWEN3_30B


def test_the_learner_logs_the_table_that_check_prints() -> None:
    settings = Settings.model_validate({"learner": {"num_ranks": 8, "zero_stage": 3, "dtype": "bfloat16"}})
    with capture_logs() as lines:
        log_expected_memory(QWEN3_30B, settings, "cuda")
    rows = [row.texts for row in memory_rows(shape_of(QWEN3_30B), settings, cuda=True)]
    assert [(each["what"], each["device"], each["host"], each["rank_0_in_addition"]) for each in lines] == rows
    assert {each["event"] for each in lines} == {"memory_of_a_rank_gib"}
    assert ("weights", "7.1", "-", "-") in rows


def test_a_model_of_unknown_shape_has_no_table() -> None:
    with capture_logs() as lines:
        log_expected_memory({"model_type": "odd"}, Settings(), "cpu")
    assert [each["event"] for each in lines] == ["memory_not_estimated"]
    assert "num_attention_heads" in lines[0]["reason"]
