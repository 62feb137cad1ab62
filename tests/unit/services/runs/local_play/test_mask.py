"""Which tokens are trained, context or discarded, over chunks that cut them anywhere."""

from typing import Any

import numpy as np
import pytest

from gspo_protocol.messages import Chunk, Segment, VersionRun
from gspo_services.runs.local_play.mask import Mask, TokenRun, mask_of


def chunk(offset: int, *segments: tuple[Any, int, int, int]) -> tuple[Chunk, dict[str, Any]]:
    """Segments are (kind, turn, sequence, tokens); token ids count from ``offset``."""
    parts = [Segment(kind, turn, num_tokens, sequence) for kind, turn, sequence, num_tokens in segments]
    num_tokens = sum(part.num_tokens for part in parts)
    ids = np.arange(offset, offset + num_tokens, dtype=np.int32)
    message = Chunk(
        trajectory_id=1, epoch=1, offset=offset, num_tokens=num_tokens, segments=parts,
        version_runs=[VersionRun(1, num_tokens)],
    )  # fmt: skip
    return message, {"token_ids": ids, "logprobs": -ids.astype(np.float32)}


CHUNKS = [
    chunk(0, ("observation", 0, 0, 3), ("action", 0, 0, 2)),
    chunk(5, ("action", 0, 0, 1), ("observation", 1, 1, 2), ("action", 1, 1, 1)),
    chunk(9, ("observation", 2, 0, 1), ("action", 2, 0, 2)),
]


def uses(mask: Mask) -> list[list[tuple[str, int, list[int]]]]:
    return [[(run.use, run.turn, run.token_ids) for run in runs] for runs in mask.sequences]


def test_runs_go_on_over_chunks_and_sequences_lie_apart() -> None:
    mask = mask_of(CHUNKS, [])
    assert uses(mask) == [
        [("context", 0, [0, 1, 2]), ("trained", 0, [3, 4, 5]), ("context", 2, [9]), ("trained", 2, [10, 11])],
        [("context", 1, [6, 7]), ("trained", 1, [8])],
    ]
    assert mask.sequences[0][1].logprobs == [-3.0, -4.0, -5.0]
    assert [mask.num_tokens(use) for use in ("trained", "context", "discarded")] == [6, 6, 0]  # type: ignore[arg-type]
    assert mask.longest == 9


@pytest.mark.parametrize(("discarded", "trained"), [([1], [0, 2]), (None, [])])
def test_discarded_turns_are_neither_trained_nor_context(discarded: list[int] | None, trained: list[int]) -> None:
    mask = mask_of(CHUNKS, discarded)
    runs: list[TokenRun] = [run for each in mask.sequences for run in each]
    assert [run.turn for run in runs if run.use == "trained"] == trained
    assert sorted({run.turn for run in runs if run.use == "discarded"} | set(trained)) == [0, 1, 2]
    assert mask.num_tokens("context") == 6


def test_an_episode_without_tokens_has_no_sequence() -> None:
    assert (mask_of([], None).sequences, mask_of([], []).longest) == ([], 0)
