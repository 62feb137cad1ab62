"""What a judge is asked and answers, its cache, and its errors."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gspo.tasks.judge import Judge, JudgeError
from gspo.tasks.judge.answer_files import AnswerFiles, digest_of
from gspo.tasks.judge.limits import Pace, RequestPlaces
from tests.support.rewards.judges import FakeJudge, completion, judged

ASKED = [{"role": "user", "content": "Is it good?"}]


@pytest_asyncio.fixture
async def served_judge() -> AsyncIterator[tuple[FakeJudge, str]]:
    async with judged() as served:
        yield served


async def asked(judge: Judge, *texts: str, **parameters: Any) -> list[str]:
    try:
        return [await judge.ask([{"role": "user", "content": text}], **parameters) for text in texts]
    finally:
        await judge.aclose()


def a_judge(url: str, **changes: Any) -> Judge:
    return Judge("judge", **{"base_url": url, "api_key": "secret", "max_retries": 2, **changes})


async def test_a_judge_gets_the_conversation_and_the_parameters(served_judge: tuple[FakeJudge, str]) -> None:
    fake, url = served_judge
    judge = a_judge(url)
    assert await judge.ask(ASKED, temperature=0, max_tokens=5) == "1"
    answer = await judge.complete(ASKED)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("2", "stop")
    await judge.aclose()
    assert fake.requests == [
        {"model": "judge", "messages": ASKED, "temperature": 0, "max_tokens": 5},
        {"model": "judge", "messages": ASKED},
    ]
    assert fake.keys == ["Bearer secret"] * 2


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
async def test_a_failure_that_may_pass_is_tried_again(served_judge: tuple[FakeJudge, str], status: int) -> None:
    fake, url = served_judge
    fake.script = [(status, "busy"), (status, "busy")]
    assert await asked(a_judge(url), "x") == ["3"]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([(429, "slower")] * 3, "answered 429: slower"),
        ([(401, "no such key")], "answered 401: no such key (reward code gets a key only if reward.variables names it)"),
        ([(404, "no model")], "answered 404: no model"),
        ([(200, "<html>")], "answered with something that is not JSON: <html>"),
        ([(200, {"choices": []})], "answered without choices: {"),
        ([(200, {"choices": [None]})], "answered without text: None"),
        ([(200, completion(None))], "answered without text: {'index': 0, 'finish_reason': 'stop'"),
        ([(200, completion(" "))], "answered without text"),
        ([(400, "x" * 10_000)], "x" * 500 + "..."),
    ],
)
async def test_an_answer_that_is_none_says_what_came(
    served_judge: tuple[FakeJudge, str], script: list[tuple[int, Any]], text: str
) -> None:
    fake, url = served_judge
    fake.script = script
    with pytest.raises(JudgeError) as error:
        await asked(a_judge(url), "x")
    assert text in str(error.value)
    assert "secret" not in str(error.value)


async def test_a_judge_that_is_away_is_named_with_what_may_be_missing() -> None:
    async with judged() as (_, url):
        pass
    with pytest.raises(JudgeError, match=r"judge at http.* cannot be reached: .*reward\.network = true"):
        await asked(a_judge(url, max_retries=0), "x")


async def test_a_judge_that_says_nothing_is_given_up() -> None:
    left = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        with pytest.raises(JudgeError, match=r"did not answer within 0\.1 s, in one try"):
            await asked(a_judge(url, max_retries=0, timeout_s=0.1), "x")
        await left.wait()


async def test_a_judge_without_a_key_says_where_one_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judge = Judge("judge")
    with pytest.raises(JudgeError, match=r"set OPENAI_API_KEY .* name it in reward\.variables"):
        await judge.ask(ASKED)


async def test_the_same_request_is_asked_once_and_another_again(served_judge: tuple[FakeJudge, str], tmp_path: Path) -> None:
    _, url = served_judge
    folder = tmp_path / "new" / "folder"
    assert await asked(a_judge(url, folder=folder), "a", "a", "b") == ["1", "1", "2"]
    assert await asked(a_judge(url, folder=str(folder)), "b", "a") == ["2", "1"], "another process, a later run"
    assert await asked(a_judge(url, folder=folder), "a", seed=1) == ["3"]
    assert await asked(a_judge(url, folder=folder, cache=False), "a", "a") == ["4", "5"]
    assert await asked(a_judge(url), "a", "a") == ["6", "7"]
    other = Judge("another", base_url=url, api_key="secret", folder=folder)
    assert await asked(other, "a") == ["8"]


async def test_an_answer_without_a_reward_is_kept_like_any_but_a_failure_is_not(
    served_judge: tuple[FakeJudge, str], tmp_path: Path
) -> None:
    fake, url = served_judge
    fake.script = [(400, "no")]
    with pytest.raises(JudgeError):
        await asked(a_judge(url, folder=tmp_path), "a")
    assert await asked(a_judge(url, folder=tmp_path), "a") == ["2"]


@pytest.mark.parametrize("damage", [b"", b'{"choices": [', b"[]", b"{}", b"\xff"])
async def test_a_damaged_file_of_an_answer_is_asked_for_again(
    served_judge: tuple[FakeJudge, str], tmp_path: Path, damage: bytes
) -> None:
    _, url = served_judge
    assert await asked(a_judge(url, folder=tmp_path), "a") == ["1"]
    (file,) = (tmp_path / "answers").rglob("*.json")
    file.write_bytes(damage)
    assert await asked(a_judge(url, folder=tmp_path), "a", "a") == ["2", "2"]


def test_an_answer_is_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    files = AnswerFiles(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        files.put("ab" * 16, {"choices": [1]})
    assert files.get("ab" * 16) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_digest_does_not_depend_on_the_order_of_keys_and_refuses_what_is_no_json() -> None:
    assert digest_of({"a": 1, "b": [{"c": 2, "d": 3}]}) == digest_of({"b": [{"d": 3, "c": 2}], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
    for bad in (object(), float("nan")):
        with pytest.raises(ValueError, match="must be JSON"):
            digest_of({"a": bad})


async def test_a_folder_that_cannot_be_used_is_named(served_judge: tuple[FakeJudge, str], tmp_path: Path) -> None:
    fake, url = served_judge
    (tmp_path / "file").write_text("")
    with pytest.raises(JudgeError, match=r"the judge's folder .*/file/below cannot be used"):
        await asked(a_judge(url, folder=tmp_path / "file" / "below"), "a")
    assert fake.requests == []


def shared_file(folder: Path, kind: str) -> Path:
    (path,) = folder.glob(f"{kind}-*")
    return path


async def test_each_try_takes_its_place_in_the_row(served_judge: tuple[FakeJudge, str], tmp_path: Path) -> None:
    fake, url = served_judge
    fake.script = [(503, "busy"), (503, "busy")]
    begin = time.monotonic()
    assert await asked(a_judge(url, folder=tmp_path, requests_per_minute=600), "a") == ["3"]
    assert float(shared_file(tmp_path, "pace").read_text().split()[1]) >= begin + 3 * 0.1


async def test_a_retry_after_holds_for_all(served_judge: tuple[FakeJudge, str], tmp_path: Path) -> None:
    fake, url = served_judge
    fake.script, fake.headers = [(429, "slower")] * 2, {"Retry-After": "500"}
    judge = a_judge(url, folder=tmp_path, requests_per_minute=600, max_retries=0)
    with pytest.raises(JudgeError, match="answered 429: slower"):
        await asked(judge, "a")
    assert 30 < Pace(shared_file(tmp_path, "pace"), 600).reserve() <= 60


@pytest.mark.parametrize("said", ["Wed, 21 Oct 2026 07:28:00 GMT", "nan"])
async def test_a_retry_after_of_another_form_changes_nothing(
    served_judge: tuple[FakeJudge, str], tmp_path: Path, said: str
) -> None:
    fake, url = served_judge
    fake.script, fake.headers = [(429, "slower")], {"Retry-After": said}
    judge = a_judge(url, folder=tmp_path, requests_per_minute=6000, max_retries=0)
    with pytest.raises(JudgeError, match="answered 429: slower"):
        await asked(judge, "a")
    assert Pace(shared_file(tmp_path, "pace"), 6000).reserve() < 1


async def test_a_place_is_held_while_the_judge_is_asked(served_judge: tuple[FakeJudge, str], tmp_path: Path) -> None:
    fake, url = served_judge
    free: list[bool] = []
    fake.on_request = lambda: free.append(RequestPlaces(shared_file(tmp_path, "places"), 1).take() is not None)
    assert await asked(a_judge(url, folder=tmp_path, concurrency=1), "a", "b") == ["1", "2"]
    assert free == [False, False]


async def test_a_judge_is_asked_from_several_event_loops(served_judge: tuple[FakeJudge, str]) -> None:
    fake, url = served_judge
    judge = a_judge(url)
    assert await judge.ask(ASKED) == "1"
    assert await asyncio.to_thread(lambda: asyncio.run(asked(judge, "a"))) == ["2"]
    assert await judge.ask(ASKED) == "3"
    await judge.aclose()
    assert fake.ports[0] == fake.ports[2] != fake.ports[1], "each loop has connections of its own, and keeps them"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": ""}, "model of a judge is empty"),
        ({"requests_per_minute": 0, "folder": "x"}, "requests_per_minute of a judge is 0"),
        ({"requests_per_minute": float("nan"), "folder": "x"}, "requests_per_minute of a judge is nan"),
        ({"concurrency": 0, "folder": "x"}, "concurrency of a judge is 0"),
        ({"concurrency": 5000, "folder": "x"}, "concurrency of a judge is 5000: expected 1 to 1024"),
        ({"timeout_s": 0}, "timeout_s of a judge is 0"),
        ({"max_retries": -1}, "max_retries of a judge is -1"),
        ({"requests_per_minute": 5}, "give folder"),
        ({"concurrency": 5}, "give folder"),
    ],
)
def test_a_field_out_of_range_is_refused_with_its_value(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Judge(**{"model": "judge", **fields})


async def test_a_stream_and_what_is_no_json_are_refused(tmp_path: Path) -> None:
    judge = Judge("judge", api_key="secret", folder=tmp_path)
    for parameters, text in (({"stream": True}, "leave out stream"), ({"tools": object()}, "must be JSON")):
        with pytest.raises(ValueError, match=text):
            await judge.ask(ASKED, **parameters)
    await judge.aclose()
