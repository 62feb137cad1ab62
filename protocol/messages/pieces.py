"""What trajectories consist of besides tokens, as arrays: their segments, version runs and turn rewards.

A message's header is small and read as a whole. Thousands of turns travel behind it, as the tokens do.

    segments        int32 [n, 4]: kind (an index into KINDS), turn, sequence, number of tokens
    version_runs    int64 [n, 2]: version, number of tokens
    turn_rewards    float64 [n]
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from gspo_protocol.messages.base import Segment, SegmentKind, VersionRun

SPAN_ARRAYS: Final[dict[str, str]] = {"segments": "int32", "version_runs": "int64"}
PIECE_ARRAYS: Final[dict[str, str]] = {**SPAN_ARRAYS, "turn_rewards": "float64"}
KINDS: Final[tuple[SegmentKind, ...]] = get_args(SegmentKind)
ACTION: Final = KINDS.index("action")
OBSERVATION: Final = KINDS.index("observation")
_WIDTHS: Final = {"segments": 4, "version_runs": 2}


class Pieces(NamedTuple):
    """The pieces of one trajectory, or of several that follow one another."""

    segments: Sequence[Segment]
    version_runs: Sequence[VersionRun]
    turn_rewards: Sequence[float]


NO_PIECES: Final = Pieces((), (), ())


def piece_arrays(trajectories: Sequence[Pieces]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of trajectories, end to end."""
    segments = [
        (KINDS.index(segment.kind), segment.turn, segment.sequence, segment.num_tokens)
        for each in trajectories
        for segment in each.segments
    ]
    runs = [(run.version, run.num_tokens) for each in trajectories for run in each.version_runs]
    return {
        "segments": np.array(segments, "<i4").reshape(len(segments), _WIDTHS["segments"]),
        "version_runs": np.array(runs, "<i8").reshape(len(runs), _WIDTHS["version_runs"]),
        "turn_rewards": np.array([reward for each in trajectories for reward in each.turn_rewards], "<f8"),
    }


def pieces_in(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Pieces:
    """Return the pieces that ``check_pieces`` has checked."""
    return Pieces(
        [Segment(KINDS[kind], turn, num, sequence) for kind, turn, sequence, num in arrays["segments"].tolist()],
        [VersionRun(version, num) for version, num in arrays["version_runs"].tolist()],
        arrays["turn_rewards"].tolist(),
    )


def check_pieces(arrays: Mapping[str, np.ndarray[Any, Any]], num_tokens: int) -> None:
    """Raises: ValueError with the array's name when it has another shape, impossible values, or covers other tokens."""
    check_spans(arrays, num_tokens)
    check_rewards(arrays["turn_rewards"])


def check_rewards(turn_rewards: np.ndarray[Any, Any]) -> None:
    """Raises: ValueError when this is not a list of finite numbers."""
    if turn_rewards.ndim != 1 or (turn_rewards.size and not np.isfinite(turn_rewards).all()):
        raise ValueError("array turn_rewards is not a list of finite numbers")


def check_spans(arrays: Mapping[str, np.ndarray[Any, Any]], num_tokens: int) -> None:
    """The same for the arrays that cover tokens: segments and version runs."""
    if not num_tokens and all(arrays[name].shape == (0, width) for name, width in _WIDTHS.items()):
        return  # A lease that begins: nearly all of them.
    for name, width in _WIDTHS.items():
        array = arrays[name]
        if array.ndim != 2 or array.shape[1] != width:
            raise ValueError(f"array {name} has shape {array.shape}, expected rows of {width}")
        counts = array[:, -1]
        if (counts < 1).any() or (counts > num_tokens).any() or int(counts.sum(dtype=np.int64)) != num_tokens:
            raise ValueError(f"array {name} covers {int(counts.sum(dtype=np.int64))} tokens, num_tokens is {num_tokens}")
    kinds, places = arrays["segments"][:, 0], arrays["segments"][:, 1:3]
    if ((kinds < 0) | (kinds >= len(KINDS))).any() or (places < 0).any():
        raise ValueError("array segments holds a kind, a turn or a sequence that does not exist")
    if (arrays["version_runs"][:, 0] < -1).any():
        raise ValueError("array version_runs holds a version below -1")
