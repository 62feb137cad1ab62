"""Runs every target on its kept inputs and on a short random search; the targets find planted bugs."""

import tracemalloc
from functools import cache
from random import Random

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo_protocol.codec import decode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.limits import MAX_HEADER_BYTES, MAX_LARGE_HEADER_BYTES
from tests.fuzz.bugs import BUGS, PlantedBug
from tests.fuzz.corpus import cases_of
from tests.fuzz.target import Measured, Target, Violation
from tests.fuzz.targets.registry import TARGETS
from tests.simulation.bugs import planted

EXAMPLES = 20
MAX_CASES_TO_FIND = 1000
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)


@cache
def inputs_of(name: str) -> list[bytes]:
    target = TARGETS[name]
    return [*target.seeds(), *cases_of(target.name).values()]


def changed(target: Target, rng: Random) -> bytes:
    """An input with one to three changes."""
    data = rng.choice(inputs_of(target.name))
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = target.mutate(data, rng)
    return data


@every_target
def test_kept_inputs_break_nothing(target: Target) -> None:
    measured = Measured()
    for data in inputs_of(target.name):
        measured.run(target, data)
    assert measured.cases >= 2


@every_target
def test_a_valid_input_with_errors_breaks_nothing(target: Target) -> None:
    measured = Measured()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32 - 1))
    def run(seed: int) -> None:
        measured.run(target, changed(target, Random(seed)))

    run()


@every_target
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=64))
def test_any_bytes_break_nothing(target: Target, data: bytes) -> None:
    Measured().run(target, data)


@pytest.mark.parametrize("planted_bug", BUGS, ids=lambda each: each.bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(planted_bug: PlantedBug) -> None:
    target = TARGETS[planted_bug.target]
    rng = Random(0)
    with planted(planted_bug.bug):
        measured = Measured(max_case_bytes=16 * 1024 * 1024)
        for data in (*inputs_of(target.name), *(changed(target, rng) for _ in range(MAX_CASES_TO_FIND))):
            try:
                measured.run(target, data)
            # Any error counts: it would end a session.
            except Exception:  # noqa: BLE001
                return
    pytest.fail(f"{measured.cases} cases did not find it")


def test_a_case_that_takes_too_long_or_too_much_is_a_violation() -> None:
    def spend(data: bytes) -> None:
        bytes(len(data) * 1_000_000)

    target = Target(name="spends", run=spend, seeds=lambda: [b""], mutate=lambda data, _: data, cases=1)
    with pytest.raises(Violation, match="3 bytes took"):
        Measured(max_case_s=-1).run(target, b"abc")
    tracemalloc.start()
    try:
        Measured(max_case_bytes=4_000_000).run(target, b"abc")
        with pytest.raises(Violation, match="bytes of memory, 2000000 allowed"):
            Measured(max_case_bytes=2_000_000).run(target, b"abc")
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["chunk", "unheard of"])
def test_a_large_header_is_unpacked_only_when_its_type_allows_the_size(kind: str) -> None:
    empty_lists = b"\xdd" + (2 * MAX_HEADER_BYTES).to_bytes(4, "big") + b"\x90" * (2 * MAX_HEADER_BYTES)
    claims = msgpack.packb({"m": {"type": kind}, "s": 7, "a": []})
    frame = b"\x84" + claims[1:] + b"\xa1x" + empty_lists
    assert MAX_HEADER_BYTES < len(frame) < MAX_LARGE_HEADER_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as refusal:
            decode([frame])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusal.value.seq == 7
    assert peak < 1024 * 1024
    assert f"{kind}: header has {len(frame)} bytes, {MAX_HEADER_BYTES} allowed (MAX_HEADER_BYTES)" in str(refusal.value)
