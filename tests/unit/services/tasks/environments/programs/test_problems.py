"""Tests as they travel with a task."""

import base64
import zlib

import pytest

from gspo_services.tasks.environments.programs import Problem, ProgramTest, packed_tests, problems

TESTS = [ProgramTest(input="1\n" * 1000, output=str(number)) for number in range(50)]


def test_few_tests_travel_as_they_are_and_many_are_packed() -> None:
    few, none = packed_tests(TESTS[:2])
    assert (few, none) == (TESTS[:2], "")
    assert Problem(tests=few).carried_tests() == TESTS[:2]
    nothing, packed = packed_tests(TESTS)
    assert nothing == []
    assert len(packed) < 5000
    assert Problem(packed=packed).carried_tests() == TESTS


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        ("no base64!", "base64"),
        (base64.b64encode(b"no zlib").decode(), "zlib cannot unpack them"),
        (packed_tests(TESTS)[1][:80], "they are cut off"),
        (base64.b64encode(zlib.compress(b'[{"in": 1}]')).decode(), "the packed tests are not tests"),
    ],
)
def test_packed_tests_that_are_damaged_are_an_error(packed: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){says}"):
        Problem(packed=packed).carried_tests()


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "MAX_TESTS_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        problems.unzipped(zlib.compress(bytes(1001)))
    assert problems.unzipped(zlib.compress(bytes(1000))) == bytes(1000)
