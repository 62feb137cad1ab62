"""One text out of a pickle, without unpickling."""

import base64
import pickle  # noqa: TID251
from pathlib import Path

import pytest

from gspo_services.tasks.environments.layouts.livecodebench import pickled_text


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", "[]", "ä\n\U0001f600", "x" * 70_000])
def test_a_pickled_text_is_read_in_every_protocol(text: str, protocol: int) -> None:
    assert pickled_text(pickle.dumps(text, protocol=protocol)) == text


class Attack:
    """A pickle that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "attacked"
    attack = pickle.dumps(Attack(path))
    with pytest.raises(ValueError, match="expected one text and nothing else"):
        pickled_text(attack)
    assert not path.exists()
    pickle.loads(attack)
    assert path.exists()


@pytest.mark.parametrize("value", [["a"], {"a": "b"}, 1, None, ("a", "b"), b"a"])
def test_any_other_pickle_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected one"):
        pickled_text(pickle.dumps(value))


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps("text")[:-3], base64.b64encode(pickle.dumps("text"))])
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        pickled_text(data)
