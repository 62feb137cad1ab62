"""The log-probs that a checkpoint stores."""

import math
from pathlib import Path

import pytest

from gspo_services.learner.checkpoints.canary import canary_batch, require_canary, write_canary
from gspo_services.learner.checkpoints.format import CheckpointError

LOGPROBS = [-1.0, -2.5, -0.25]


def test_the_sequence_covers_the_vocabulary_and_every_token_but_the_first_counts() -> None:
    packed = canary_batch(512)
    assert packed.mask_T.sum() == 31
    # Log-probs at another temperature would not be comparable.
    assert packed.temperatures_T.unique().tolist() == [1.0]
    assert len(packed.input_ids.unique()) > 16
    assert int(packed.input_ids.max()) < 512
    assert int(canary_batch(7).input_ids.max()) < 7


@pytest.mark.parametrize(("dtype", "close", "far"), [("float32", 2e-3, 4e-3), ("bfloat16", 0.8, 1.0)])
def test_other_log_probs_are_refused_by_token(tmp_path: Path, dtype: str, close: float, far: float) -> None:
    write_canary(tmp_path, LOGPROBS)
    require_canary(tmp_path, LOGPROBS, dtype)
    require_canary(tmp_path, [-1.0, -2.5 + close, -0.25], dtype)
    with pytest.raises(CheckpointError, match=r"token 1 of the test sequence has log-prob .*, saved was -2\.50000"):
        require_canary(tmp_path, [-1.0, -2.5 + far, -0.25], dtype)


def test_a_canary_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    write_canary(tmp_path, LOGPROBS)
    with pytest.raises(CheckpointError, match="log-prob nan"):
        require_canary(tmp_path, [-1.0, -2.5, math.nan], "float32")


def test_a_missing_or_damaged_canary_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"canary\.json is damaged"):
        require_canary(tmp_path, LOGPROBS, "float32")
    for content in ("", '{"logprobs":["a"]}', '{"logprobs":' + "[" * 100_000):
        (tmp_path / "canary.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"canary\.json is damaged"):
            require_canary(tmp_path, LOGPROBS, "float32")
    write_canary(tmp_path, LOGPROBS[:2])
    with pytest.raises(CheckpointError, match="has 2 log-probs, not 3"):
        require_canary(tmp_path, LOGPROBS, "float32")
