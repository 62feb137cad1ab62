"""The versions that a chunk names for its tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Chunk, Segment, VersionRun
from services.broker.ledger.token_versions import action_tokens

segments = st.lists(
    st.tuples(st.sampled_from(["action", "observation"]), st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=6
)


@given(parts=segments, data=st.data())
def test_action_tokens_agrees_with_counting_token_by_token(parts: list[tuple[str, int, int]], data: st.DataObject) -> None:
    kinds = [kind for kind, _, num in parts for _ in range(num)]
    versions = [data.draw(st.integers(1, 9)) if kind == "action" else -1 for kind in kinds]
    chunk = Chunk(
        trajectory_id=0,
        epoch=1,
        offset=0,
        num_tokens=len(kinds),
        segments=[Segment(kind, turn, num) for kind, turn, num in parts],  # type: ignore[arg-type]
        version_runs=[VersionRun(version, 1) for version in versions],
    )
    found = action_tokens(chunk, newest_version=9)
    actions = [version for version in versions if version != -1]
    assert (found.num, found.version_sum) == (len(actions), sum(actions))
    assert (found.oldest, found.last) == ((min(actions), actions[-1]) if actions else (0, 0))
    assert found.num_turns == max((turn + 1 for kind, turn, _ in parts if kind == "action"), default=0)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((-1, -1), "version -1 to action tokens: published are 1 to 4"),
        ((-1, 5), "version 5 to action tokens"),
        ((-1, 0), "version 0 to action tokens"),
        ((2, 2), "version 2 to observation tokens: it must be -1"),
    ],
)
def test_impossible_versions_are_named(versions: tuple[int, int], reason: str) -> None:
    chunk = Chunk(
        trajectory_id=0,
        epoch=1,
        offset=0,
        num_tokens=4,
        segments=[Segment("observation", 0, 2), Segment("action", 0, 2)],
        version_runs=[VersionRun(version, 2) for version in versions],
    )
    with pytest.raises(ValueError, match=reason):
        action_tokens(chunk, newest_version=4)
