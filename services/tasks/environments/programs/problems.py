"""What a task of programs holds: its tests, its checker and its limits."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from gspo_services.tasks.environments.programs.owners import OwnerName

PLAIN_TESTS_BYTES: Final = 16 << 10
"""Tests of so many bytes travel with their task as they are, more of them compressed."""
PACKED_TESTS_BYTES: Final = 128 << 10
"""Tests that are larger when they are compressed stay in their file."""
MAX_TESTS_BYTES: Final = 256 << 20
"""Of all tests of a problem, unpacked."""


class ProgramTest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One run of a program and what it must say."""

    input: str
    """Standard input; for a function one argument a line, each as JSON."""
    output: str
    """What it must print; for a function its result as JSON."""
    public: bool = False
    """The policy may know it from the question."""


class CheckerProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A program that says whether an output is right, where several are."""

    source: str
    language: str
    kind: str = "testlib"
    """How it answers: "testlib" by its exit code, "prints" by a last line of 1 or 0 (open-r1/codeforces)."""


class FiledTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tests that are too large for a task: the row that has them."""

    path: str
    row: int
    """Its line in a JSONL file, its row in a Parquet file, from 1 on."""
    layout: str
    digest: str
    """Of the tests, so that a row that was changed meanwhile scores nobody."""


class GeneratedTests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """More tests, in a file of open-r1/codeforces that has those of a whole contest (columns problem_id, input, output)."""

    path: str
    problem: str
    """Its problem_id."""
    num_tests: int
    """How many the row says there are; a file with fewer scores nobody."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that grading a program needs, as a part of a task."""

    tests: list[ProgramTest] = []
    packed: str = ""
    """In place of ``tests``: their JSON, compressed by zlib and in base64."""
    in_file: FiledTests | None = None
    """In place of both, for many megabytes of tests; whoever scores needs the file."""
    generated: GeneratedTests | None = None
    """Beside them; whoever scores needs that file, too."""
    owner: OwnerName = ""
    """Whose rules the program is run and compared by; "" for a row of your own."""
    function: str = ""
    """The function, or the method of a class Solution, that is called; "" for a program that reads and prints."""
    checker: CheckerProgram | None = None
    time_limit_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """For one test, where the row says it; the environment's otherwise."""
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Likewise."""
    total_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """For all tests, likewise."""
    solution: str = ""
    """A program that is known to be right, to find tests that are wrong; "" where there is none."""
    solution_language: str = "python"

    def carried_tests(self) -> list[ProgramTest]:
        """The tests that travel with it, unpacked. Raises: ValueError for tests that do not unpack, or are none."""
        if not self.packed:
            return self.tests
        return unpack_tests(self.packed)


class TaskFault(Exception):
    """The task is wrong, and no program can be scored by it. The text names its file and row and the way out."""


TestsElsewhere = FiledTests | GeneratedTests
"""Tests that do not travel with their task."""


def digest_of(tests: Sequence[ProgramTest]) -> str:
    """What tells tests from others, in every process."""
    return hashlib.blake2b(msgspec.json.encode(tests), digest_size=16).hexdigest()


def packed_tests(tests: Sequence[ProgramTest]) -> tuple[list[ProgramTest], str]:
    """The tests as fields of a ``Problem``: as they are, or compressed."""
    text = msgspec.json.encode(tests)
    if len(text) <= PLAIN_TESTS_BYTES:
        return list(tests), ""
    return [], base64.b64encode(zlib.compress(text, 9)).decode("ascii")


def unpack_tests(packed: str) -> list[ProgramTest]:
    """The opposite. Raises: ValueError for what is not packed tests."""
    try:
        return msgspec.json.decode(unzipped(base64.b64decode(packed, validate=True)), type=list[ProgramTest])
    except msgspec.DecodeError as error:
        raise ValueError(f"the packed tests are not tests: {error}") from error


def unzipped(data: bytes) -> bytes:
    """What zlib has compressed, up to MAX_TESTS_BYTES. Raises: ValueError for more, and for what is damaged."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MAX_TESTS_BYTES)
    except zlib.error as error:
        raise ValueError(f"zlib cannot unpack them: {error}") from error
    if unpacker.unconsumed_tail:
        raise ValueError(f"they have more than {MAX_TESTS_BYTES} bytes")
    if not unpacker.eof:
        raise ValueError("they are cut off")
    return text
