"""A teacher that is a server: what it answers, what it must not answer, and what a batch needs it for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo.model.packing import PackedBatch, pack
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.batch_failures import BatchFailures
from gspo_services.learner.broker import NoBroker
from gspo_services.learner.engine.server_teacher import ServerTeacher
from gspo_services.learner.start import engine_settings_of
from gspo_services.learner.teacher import RefusedSequenceError, ScoreRecord, TeacherError, TeacherServer
from gspo_services.shared.settings import Settings, called_addresses, opened_paths
from tests.support.loss.sequences import random_groups
from tests.support.teacher.played_teacher import Answer, PlayedTeacher, played_teacher, scores_of, sound


@pytest.fixture
def played() -> Iterator[PlayedTeacher]:
    with played_teacher() as server:
        yield server


def micro_batches(seed: int = 1) -> list[PackedBatch]:
    """Two, and an empty one."""
    sequences, _ = sequences_with_advantages(random_groups(2, 3, seed=seed), AdvantageSettings())
    return [pack(sequences[:2], policy_version=0), pack([], policy_version=0), pack(sequences[2:], policy_version=0)]


def expected(packed: PackedBatch) -> list[float]:
    ids = packed.input_ids[0].tolist()
    return [
        score
        for begin, end in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False)
        for score in [*scores_of(ids[begin:end]), 0.0]
    ]


def teacher_of(played: PlayedTeacher, directory: Path, rank: int = 0) -> ServerTeacher:
    earlier = directory.parent / "scores"
    record = ScoreRecord(directory / "scores", rank, earlier if earlier.is_dir() else None)
    return ServerTeacher(TeacherServer(played.url, timeout_s=10.0, retry_s=0.0), record)


def score(played: PlayedTeacher, *sequences: list[int], **options: float) -> list[np.ndarray]:
    found: dict[int, np.ndarray] = {}
    TeacherServer(played.url, timeout_s=10.0, **options).score(dict(enumerate(sequences)), found)
    return [found[place] for place in range(len(sequences))]


def test_each_sequence_of_a_run_is_asked_for_once_whoever_trains_it_again(played: PlayedTeacher, tmp_path: Path) -> None:
    """Also without the server, on another rank, and bit for bit: a replay needs no more."""
    batch = micro_batches()
    teacher = teacher_of(played, tmp_path)
    teacher.prepare(batch)
    scores = [teacher.logprobs(packed) for packed in batch if not packed.is_empty]
    for found_T, packed in zip(scores, (batch[0], batch[2]), strict=True):
        assert found_T.tolist() == pytest.approx(expected(packed))
    assert len(played.asked) == 6
    played.answer = lambda ids: (500, b"away")
    for directory, rank in ((tmp_path, 0), (tmp_path, 3), (tmp_path / "replay", 0)):
        again = teacher_of(played, directory, rank)
        again.prepare(batch)
        assert all(torch.equal(again.logprobs(p), s) for p, s in zip((batch[0], batch[2]), scores, strict=True))
    assert len(played.asked) == 6
    with pytest.raises(TeacherError, match="answered 500 to /generate: away"):
        again.prepare(micro_batches(seed=2))
    with played_teacher() as another:
        teacher_of(another, tmp_path).prepare(batch)
        assert len(another.asked) == 6


def altered(place: int, logprob: Any, token_id: int | None = None) -> Answer:
    def answer(ids: list[int]) -> tuple[int, Any]:
        _, content = sound(ids)
        row = content["meta_info"]["input_token_logprobs"][place]
        row[0] = logprob
        row[1] = row[1] if token_id is None else token_id
        return 200, content

    return answer


BROKEN: dict[str, tuple[Answer, str]] = {
    "no number": (altered(2, None), r"has log-prob None for token 2 of 3 \(id 7\): expected a number that is not above 0"),
    "infinite in float32": (altered(1, -1e300), r"has log-prob -1e\+300 for token 1 of 3 \(id 5\): .*finite in float32"),
    "more than certain": (altered(1, 50.0), r"has log-prob 50.0 for token 1 of 3 \(id 5\): .*not above 0"),
    "NaN": (lambda ids: (200, json.dumps(altered(1, float("nan"))(ids)[1]).encode()), "did not answer as SGLang"),
    "other tokens": (altered(1, -1.0, 99), "was asked for 3 tokens and scored others"),
    "too many": (lambda ids: sound([*ids, 9]), "was asked for 3 tokens and scored others"),
    "too large": (
        lambda ids: (200, json.dumps(altered(1, "X")(ids)[1]).replace('"X"', "-1e999").encode()),
        "did not answer as SGLang",
    ),
    "no JSON": (lambda ids: (200, b"\xff"), "/generate did not answer as SGLang"),
    "unknown here": (lambda ids: (404, b"Not Found"), "answered 404 to /generate: Not Found"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_is_none_is_named_and_nothing_of_it_is_kept(name: str, played: PlayedTeacher, tmp_path: Path) -> None:
    played.answer, message = BROKEN[name]
    with pytest.raises(TeacherError, match=message) as refused:
        score(played, [3, 5, 7], retry_s=0.0)
    assert played.url in str(refused.value)
    teacher = teacher_of(played, tmp_path)
    with pytest.raises(TeacherError):
        teacher.prepare(micro_batches())
    played.answer = sound
    played.asked.clear()
    teacher.prepare(micro_batches())
    assert len(played.asked) == 6


def test_a_teacher_that_comes_back_in_time_is_asked_again_and_one_that_is_away_is_no_fault_of_the_batch(
    played: PlayedTeacher, tmp_path: Path
) -> None:
    tries = iter([(503, b"starting"), (500, b"starting")])
    played.answer = lambda ids: next(tries, None) or sound(ids)
    (found,) = score(played, [3, 5, 7])
    assert found.tolist() == pytest.approx([-1.05, -2.07])
    assert found.dtype == np.float32
    failures = BatchFailures(NoBroker(), tmp_path, rank=1)
    with pytest.raises(TeacherError, match=r"does not answer \(ConnectionRefusedError.*Start it, or name another"):
        with failures.of(7):
            TeacherServer("http://127.0.0.1:1", timeout_s=1.0, retry_s=0.0).score({0: [3, 5]}, {})
    assert list(tmp_path.glob("batch-failed*")) == []


def truncated(ids: list[int]) -> tuple[int, Any]:
    return sound(ids[:-1])


@pytest.mark.parametrize("refusal", [lambda ids: (400, b"too long"), truncated], ids=["400", "truncated"])
def test_a_refused_sequence_is_the_batchs_fault_and_what_was_scored_beside_it_is_kept(
    refusal: Answer, played: PlayedTeacher, tmp_path: Path
) -> None:
    """The broker quarantines a batch that fails again and again; a restart must not begin at the first sequence."""
    batch = micro_batches()
    refused = batch[0].input_ids[0, : batch[0].cu_seqlens[1]].tolist()
    all_begun = threading.Barrier(6)

    def answer(ids: list[int]) -> tuple[int, Any]:
        all_begun.wait(10.0)
        return refusal(ids) if ids == refused else sound(ids)

    played.answer = answer
    expected = f"a sequence of {len(refused)} tokens of this batch .*--context-length of at least {len(refused) + 7}"
    for num_asked in (6, 1):
        with pytest.raises(RefusedSequenceError, match=expected), BatchFailures(NoBroker(), tmp_path, rank=1).of(7):
            teacher_of(played, tmp_path).prepare(batch)
        assert len(played.asked) == num_asked
        played.asked.clear()
        all_begun = threading.Barrier(1)
    (note,) = tmp_path.glob("batch-failed*")
    assert "RefusedSequenceError: the teacher does not score a sequence of" in note.read_text()


def test_after_a_failure_no_other_sequence_is_begun(played: PlayedTeacher) -> None:
    """A teacher that is away is waited for once, and not once for each sequence."""
    played.answer = lambda ids: (404, b"away")
    with pytest.raises(TeacherError):
        score(played, *([3, number] for number in range(2000)))
    assert len(played.asked) < 1000


@pytest.mark.parametrize(
    ("status", "another", "expected"),
    [
        (200, (1, 1), (RefusedSequenceError, "that another rank has")),
        (404, (1, 1), (RefusedSequenceError, "that another rank has")),
        (200, (1, 0), (TeacherError, "did not answer another rank")),
        (404, (0, 0), (TeacherError, "answered 404")),
        (400, (1, 0), (RefusedSequenceError, "answered 400")),
    ],
)
def test_all_ranks_end_and_say_whether_the_batch_is_to_blame(
    status: int, another: tuple[int, int], expected: tuple[type[Exception], str], played: PlayedTeacher, tmp_path: Path
) -> None:
    """Only rank 0 tells the broker, and the sequence may be another rank's."""
    meetings: list[list[float]] = []

    def summed(own: torch.Tensor) -> torch.Tensor:
        meetings.append(own.tolist())
        return own + torch.tensor(another)

    teacher = teacher_of(played, tmp_path)
    teacher.prepare_on_all(micro_batches(), lambda own: own)
    played.answer = lambda ids: sound(ids) if status == 200 else (status, b"no")
    with pytest.raises(expected[0], match=expected[1]):
        teacher.prepare_on_all(micro_batches(seed=2), summed)
    assert meetings == [[status != 200, status == 400]]


def test_a_server_takes_the_longest_sequence_of_a_run_or_both_lengths_are_named(played: PlayedTeacher) -> None:
    """SGLang's limit is some tokens below its --context-length. What it says of these tokens does not count."""
    server = TeacherServer(played.url, timeout_s=10.0, retry_s=0.0)
    played.answer = altered(2, None)
    server.require_length(57)
    (asked,) = played.asked
    assert len(asked) == 57
    for answer in (lambda ids: (400, b"exceeds the maximum allowed length (58 tokens)"), lambda ids: sound(ids[:58])):
        played.answer = answer
        with pytest.raises(ValueError, match=r"may have 64 tokens .*58.*--context-length of at least 71"):
            server.require_length(64)
    played.answer = lambda ids: (500, b"away")
    with pytest.raises(TeacherError, match="away"):
        server.require_length(64)


def test_a_sequence_that_was_sampled_at_another_temperature_is_refused(played: PlayedTeacher, tmp_path: Path) -> None:
    batch = micro_batches()
    batch[0].temperatures_T[:] = 0.5
    with pytest.raises(ValueError, match=r"sampled at temperature 0.5, and a server scores at 1"):
        teacher_of(played, tmp_path).prepare(batch)
    assert played.asked == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampling": {"temperature": 0.7}}, r"sampling.temperature is 0.7: a server scores at temperature 1"),
        ({"schedule": {"temperature": {"steps": [[3, 0.5]]}}}, r"sampling.temperature is 0.5"),
        ({"learner": {"sequence_parallel": 2, "num_ranks": 2}}, r"sequence_parallel is 2: ranks that share a sequence"),
    ],
    ids=["temperature", "scheduled", "shared"],
)
def test_settings_under_which_a_server_cannot_teach_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.model_validate({"distillation": {"teacher": "http://t:30000"}} | changed)


def test_a_run_with_a_served_teacher_asks_there_and_keeps_the_answers_in_its_directory() -> None:
    given = {"distillation": {"teacher": "http://t:30000/", "timeout_s": 7}, "run": {"directory": "/runs/a"}}
    settings = Settings.model_validate(given)
    engine = engine_settings_of(settings, "cpu")
    assert engine.teacher is None
    assert engine.teacher_server is not None
    assert (engine.teacher_server.url, engine.teacher_server.timeout_s) == ("http://t:30000", 7)
    assert engine.teacher_server.scores == Path("/runs/a/teacher-scores")
    assert AdvantageSettings.of(settings).teacher_coefficient == 1
    assert "http://t:30000" in [each.address for each in called_addresses(settings, "learner")]
    assert "distillation.teacher" not in [each.setting for each in opened_paths(settings, "learner")]
