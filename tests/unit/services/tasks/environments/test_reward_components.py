"""Rewards of named components, async rewards, and what the pool's options allow."""

import os
import socket
import struct
import tempfile
from typing import Any, Literal

import msgpack
import pytest

from gspo.tasks.environments import Plain, RewardJob
from gspo_services.tasks.environments.reward_pool import RewardPool, RewardPoolOptions, RewardResult
from gspo_services.tasks.environments.scoring import score_of
from gspo_services.tasks.worker.reward_value import UnscoredError
from tests.support.processes.marked import outliving


def job(name: str, deadline_s: float = 30.0, weights: dict[str, float] | None = None, **arguments: Plain) -> RewardJob:
    function = f"tests.support.reward_functions:{name}"
    return RewardJob(function=function, arguments=arguments, deadline_s=deadline_s, weights=weights)


async def graded(job: RewardJob, **options: Any) -> RewardResult:
    async with RewardPool(RewardPoolOptions(num_workers=1, **options)) as pool:
        return await pool.grade(job)


async def test_components_are_weighted_and_reported() -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        summed = await pool.grade(job("parts", right=1, style=0.25))
        weighted = await pool.grade(job("parts", weights={"right": 2.0, "style": -1.0}, right=True, style=0.25, note=9))
        awaited = await pool.grade(job("later", text="four"))
    assert summed == RewardResult(reward=1.25, components={"right": 1.0, "style": 0.25})
    assert weighted == RewardResult(reward=1.75, components={"right": 1.0, "style": 0.25, "note": 9.0})
    assert awaited == RewardResult(reward=4.0, components={"length": 4.0})


@pytest.mark.parametrize(
    ("failing", "reason", "detail"),
    [
        (job("parts", weights={"right": 1.0, "style": 1.0}, right=1), "missing_component", '"style"'),
        (job("length", weights={"right": 1.0}, text="x"), "missing_component", '"right"'),
        (job("parts"), "missing_component", "no components"),
        (job("parts", right="1"), "not_finite", "component \"right\" of the reward is '1'"),
        (job("parts", right=None), "not_finite", "None"),
        (
            job("parts", right=1e300, weights={"right": 1e300}),
            "not_finite",
            "weighted sum of the reward's components is inf",
        ),
        (job("parts", **{str(n): 0.0 for n in range(17)}), "bad_component", "17 components, 16 allowed (MAX_COMPONENTS)"),
        (job("nan_part"), "not_finite", 'component "style" of the reward is nan'),
        (job("fail_later"), "raised", "KeyError: 'later'"),
    ],
    ids=lambda value: value.function.rpartition(":")[2] if isinstance(value, RewardJob) else None,
)
async def test_a_component_that_is_missing_or_no_number_is_a_failure(failing: RewardJob, reason: str, detail: str) -> None:
    result = await graded(failing)
    assert (result.reward, result.failure, detail in result.detail) == (None, reason, True), result


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        ({"a": 1e308, "b": 1e308}, None),
        ({"a": 1e300}, {"a": -1e300}),
        ({"a": 1e300, "b": 1e300}, {"a": 1e300, "b": -1e300}),
    ],
    ids=["too large on the way", "one infinity", "infinities of both signs"],
)
def test_components_whose_weighted_sum_overflows_have_no_score(value: Any, weights: Any) -> None:
    with pytest.raises(UnscoredError, match=r"weighted sum of the reward's components is .*give smaller"):
        score_of(value, weights)


@pytest.mark.parametrize(
    ("value", "weights", "reward"),
    [(1.0, None, 1.0), ({"a": 1.0, "b": 2.0}, None, 3.0), ({"a": 1.0, "b": 2.0}, {"b": 0.5}, 1.0), (0.5, {}, 0.5)],
)
def test_a_score_is_the_weighted_sum(
    value: float | dict[str, float], weights: dict[str, float] | None, reward: float
) -> None:
    assert score_of(value, weights).reward == reward


@pytest.mark.parametrize("on_deadline", ["fail", "zero"])
@pytest.mark.parametrize(
    ("slow", "failure", "detail"),
    [
        (job("hang", deadline_s=0.2), "deadline", "not done after 0.2 s"),
        (job("burn", deadline_s=60.0), "cpu_time", "more than 1 s of CPU"),
    ],
    ids=["hang", "burn"],
)
async def test_a_job_over_its_deadline_or_cpu_time_fails_or_counts_as_zero(
    slow: RewardJob, failure: str, detail: str, on_deadline: Literal["fail", "zero"]
) -> None:
    result = await graded(slow, on_deadline=on_deadline, cpu_s=1)
    expected = None if on_deadline == "fail" else 0.0
    assert (result.reward, result.failure, detail in result.detail) == (expected, failure, True), result


@pytest.mark.parametrize("name", ["refuse", "crash", "not_a_number"])
async def test_only_a_job_that_takes_too_long_counts_as_zero(name: str) -> None:
    result = await graded(job(name, text="x") if name == "refuse" else job(name), on_deadline="zero")
    assert (result.reward, result.failure is None) == (None, False)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"function": "a:b", "url": "http://x"}, "exactly one of function, url and grader"),
        ({}, "exactly one of function, url and grader"),
        ({"function": "a:b", "deadline_s": 0}, "deadline_s of a reward job is 0"),
        ({"function": "a:b", "deadline_s": float("nan")}, "deadline_s of a reward job is nan"),
        ({"function": "a:b", "deadline_s": float("inf")}, "deadline_s of a reward job is inf"),
        ({"function": "a:b", "weights": {"right": float("nan")}}, 'component "right" is nan'),
    ],
)
def test_fields_that_are_no_job_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RewardJob(arguments={}, **fields)


def test_a_job_gets_the_task_when_it_asks_for_it() -> None:
    asking = RewardJob(function="a:b", arguments={"completion": "x"}, with_task=True)
    assert asking.for_task({"prompt": "p"}).arguments == {"completion": "x", "task": {"prompt": "p"}}
    silent = RewardJob(function="a:b", arguments={"completion": "x"})
    assert silent.for_task({"prompt": "p"}).arguments == {"completion": "x"}


async def test_a_worker_that_starts_too_slowly_never_counts_as_zero() -> None:
    result = await graded(job("length", text="x"), on_deadline="zero", start_timeout_s=0.001)
    assert (result.reward, result.failure) == (None, "deadline")


async def test_each_job_has_a_scratch_folder_of_its_own_which_is_gone_after_it() -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    async with RewardPool(RewardPoolOptions(num_workers=1, scratch=True, scratch_file_bytes=100)) as pool:
        for _ in range(2):
            result = await pool.grade(job("write_in_scratch", num_bytes=100))
            assert result.components == {"found": 0.0, "written": 100.0, "named": 1.0}, result
            assert len(set(os.listdir(tempfile.gettempdir())) - before) == 1, "the worker's own"
        assert (await pool.grade(job("write_in_scratch", num_bytes=200))).components["written"] == 100.0
        assert (await pool.grade(job("hang", deadline_s=0.1))).failure == "deadline"
    assert set(os.listdir(tempfile.gettempdir())) == before


async def test_a_reward_that_shares_files_with_its_processes_is_told_the_way() -> None:
    refused = await graded(job("share_a_queue"))
    assert (refused.reward, refused.failure) == (None, "raised")
    assert refused.detail.startswith("no file may grow, and what processes share is files: set reward.scratch = true; OSE")
    assert (await graded(job("share_a_queue"), scratch=True)).reward == 1.0


async def test_the_network_is_there_when_it_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = await graded(job("connect", host="127.0.0.1", port=server.getsockname()[1]), network=True)
    assert result.reward == 1.0


async def test_a_daemon_ends_with_the_worker_that_started_it() -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        result = await pool.grade(job("daemonise"))
        assert result.reward is not None
        daemon = int(result.reward)
        assert outliving([daemon], 0.0) == [daemon]
    assert outliving([daemon]) == []


@pytest.mark.parametrize(
    "body",
    [
        struct.pack(">I", 2**31),
        struct.pack(">I", 1) + b"\xc1",
        *(
            struct.pack(">I", len(packed)) + packed
            for packed in map(
                msgpack.packb,
                [
                    5,
                    {},
                    {"reward": "1"},
                    {"reward": float("nan")},
                    {"failure": "tired"},
                    {"components": {"a": None}},
                    {"components": {"a": float("inf")}},
                    {"components": {"a b": 1.0}},
                    {"components": {str(n): 0.0 for n in range(17)}},
                    {"rewards": [1.0]},
                ],
            )
        ),
    ],
)
async def test_what_reward_code_writes_into_the_pipe_is_checked(body: bytes) -> None:
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        result = await pool.grade(
            RewardJob(function="tests.support.reward_functions:answer_falsely", arguments={"body": body})
        )  # type: ignore[dict-item]
        assert (result.reward, result.failure) == (None, "crashed"), result
        assert (await pool.grade(job("length", text="ab"))).reward == 2.0
