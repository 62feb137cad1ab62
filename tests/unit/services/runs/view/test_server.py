"""The page's server on a small real run: what it answers, to whom, and what it does with broken runs."""

import asyncio
import json
import re
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import ClientSession
from yarl import URL

from gspo_services.broker.store import LEDGER_FILE
from gspo_services.runs.reading import OpenRun, open_run
from gspo_services.runs.view import (
    LearnerNumbers,
    PageAnswers,
    ViewServer,
    WatchedRun,
    serve_until,
    watched_run,
    watched_runs,
)
from gspo_services.runs.view.groups import chosen_groups, groups_of_batch, plain_groups
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.settings import Settings
from tests.support.processes.small_run import write_small_run
from tests.support.view.served import Serve, answer, refused
from tests.support.view.shown_runs import write_self_play


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("view") / "run"
    write_small_run(directory)
    return directory


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "run"))


async def test_runs_are_named_by_their_directories(small_run: Path, run: Path, serve: Serve) -> None:
    client = await serve(small_run, run)
    first, second = await answer(client, "/api/runs")
    assert (first["name"], second["name"]) == ("run", "run-2")
    assert (first["num_trained"], first["is_live"], first["error"]) == (3, False, "")


async def test_the_overview_has_a_point_for_each_batch_and_each_drop(run: Path, serve: Serve) -> None:
    (run / "logs").mkdir()
    hello = {"event": "hello", "role": "rollout", "peer": "rollout-0", "timestamp": "2026-01-02T03:04:05Z"}
    lives = [{**hello, "session": session} for session in ("a", "a", "b")]
    (run / "logs" / "broker.log").write_text("".join(json.dumps(line) + "\n" for line in lives))
    overview = await answer(await serve(run), "/api/runs/run/overview")
    assert overview["columns"]["batch"] == [0, 1, 2]
    assert overview["columns"]["policy_version"] == [2, 4, 5]
    assert overview["dropped"] == {"failed": 1, "stale": 2}
    events = [event["event"] for event in overview["events"]]
    # A second Hello of one life is a connection that came back; another life without a Goodbye is a kill.
    assert events == ["dropped", "dropped", "dropped", "started", "killed"]
    assert overview["facts"]["wanted_batches"] == 3
    assert overview["learning"]["outcome"] == "no change can be told: the lines of the batches have no reward"
    assert overview["learning"]["findings"] == []


async def test_groups_of_a_batch_have_advantages(run: Path, serve: Serve) -> None:
    batch = await answer(await serve(run), "/api/runs/run/groups?batch=1")
    assert batch["trained_versions"] == [3, 4]
    assert len(batch["groups"]) == 2
    for group in batch["groups"]:
        rewards = [member["reward"] for member in group["members"]]
        assert sorted(rewards) == [0.0, 1.0]
        # Two members: -+ 1 / sqrt(2), as gspo.advantages has it.
        expected = [0.70711 if reward else -0.70711 for reward in rewards]
        assert [member["advantage"] for member in group["members"]] == pytest.approx(expected, abs=1e-5)


def test_a_part_of_a_batch_is_divided_by_the_deviation_of_the_whole_batch(run: Path) -> None:
    settings = Settings.model_validate({"objective": {"std_over": "batch"}})
    with open_run(run) as reading:
        whole = groups_of_batch(reading, 1, settings, {})
        assert whole is not None
        group_ids = [group["group_id"] for group in whole["groups"]]
        page = chosen_groups(reading, group_ids[-1], settings, {"status": None})["groups"]
        alone = plain_groups(reading, reading.groups_of_batch(1)[-1:], settings, {})
    assert [group["batch"] for group in page if group["group_id"] in group_ids] == [1]
    for shown in (whole["groups"][-1], page[0], alone[0]):
        # Four rewards, two of them 1: their deviation is 0.57735.
        assert sorted(member["advantage"] for member in shown["members"]) == pytest.approx([-0.86602, 0.86602], abs=1e-4)


async def test_dropped_groups_are_chosen_by_their_reason(run: Path, serve: Serve) -> None:
    client = await serve(run)
    dropped = await answer(client, "/api/runs/run/groups?drop_reason=failed")
    assert [group["group_id"] for group in dropped["groups"]] == [0]
    assert [member["advantage"] for member in dropped["groups"][0]["members"]] == [None, None]
    assert "status is 'lost': one of open, " in await refused(client, "/api/runs/run/groups?status=lost", 400)
    assert "batch is '-1'" in await refused(client, "/api/runs/run/groups?batch=-1", 400)
    assert "batch 99 was not assembled" in await refused(client, "/api/runs/run/groups?batch=99", 404)


async def test_a_trajectory_has_its_tokens_and_the_servers_that_made_it(
    run: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # The run's model.path is relative, and may be there where the tests run.
    with open_run(run) as reading:
        (resumed,) = [each for each in reading.trajectories() if len(reading.tokens(each.trajectory_id).leases) > 1]
        tokens = reading.tokens(resumed.trajectory_id)
    client = await serve(run)
    found = await answer(client, f"/api/runs/run/trajectories/{resumed.trajectory_id}")
    assert found["ids"] == tokens.token_ids_T.tolist()
    assert found["logprobs"] == pytest.approx(tokens.logprobs_T.tolist())
    assert found["versions"] == tokens.versions_T.tolist()
    assert [(lease["peer"], lease["start"]) for lease in found["leases"]] == [("rollout-0", 0), ("rollout-1", 2)]
    assert resumed.trajectory_id in [member["id"] for member in found["group"]["members"]]
    # The run's model is not there: ids without text, and why.
    assert set(found["texts"]) == {""}
    assert "no such file" in found["text_error"]
    assert "no trajectory 9999" in await refused(client, "/api/runs/run/trajectories/9999", 404)
    assert "is not a number" in await refused(client, "/api/runs/run/trajectories/1e9", 404)


async def test_what_the_policy_played_has_the_names_of_its_roles(tmp_path: Path, serve: Serve) -> None:
    black = write_self_play(tmp_path / "game")
    client = await serve(tmp_path / "game")
    found = await answer(client, f"/api/runs/game/trajectories/{black}")
    assert (found["turn_roles"], found["group"]["roles"]) == (["black"], ["white", "black"])
    assert found["group"]["members"][1]["components"] == {"white": 1.0, "black": -0.75}
    (tmp_path / "game" / "settings.json").unlink()
    found = await answer(client, f"/api/runs/game/trajectories/{black}")
    assert (found["turn_roles"], found["group"]["roles"]) == (["role 2"], [])


async def test_a_task_shows_its_episodes_over_the_versions(run: Path, serve: Serve) -> None:
    client = await serve(run)
    with open_run(run) as reading:
        group = reading.groups_of_batch(2)[0]
    task = await answer(client, f"/api/runs/run/tasks/train/{group.task_index}")
    assert {member.trajectory_id for member in group.members} <= {episode["id"] for episode in task["episodes"]}
    assert "there is no split called 'test'" in await refused(client, "/api/runs/run/tasks/test/0", 404)


async def test_nobody_asks_under_another_hosts_name(run: Path, serve: Serve) -> None:
    client = await serve(run)
    for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil.example"):
        assert "answers only to localhost" in await refused(client, "/api/runs", 403, headers={"Host": name})
    for name in ("localhost", "localhost:7420", "127.0.0.1:1", "[::1]:7420"):
        response = await client.get("/api/runs", headers={"Host": name})
        assert response.status == 200


async def test_another_host_needs_the_token_once(run: Path, serve: Serve) -> None:
    client = await serve(run, token="sesame")
    for path in ("/", "/api/runs", "/static/0/app.js", "/api/runs?token=sesam", "/r/run?token=%00"):
        assert "needs the token" in await refused(client, path, 403)
    response = await client.get("/r/run?x=time&token=sesame", allow_redirects=False)
    assert (response.status, response.headers["Location"]) == (303, "/r/run?x=time")
    cookie = response.cookies["gspo_view"]
    assert (cookie.value, cookie["httponly"], cookie["samesite"]) == ("sesame", True, "Strict")
    # The host's name does not matter then: its own cookie is what others do not have.
    assert (await client.get("/api/runs", headers={"Host": "gpu-7"}, cookies={"gspo_view": "sesame"})).status == 200
    address = URL(f"http://127.0.0.1:{client.port}//evil.example/?token=sesame", encoded=True)
    async with ClientSession() as session, session.get(address, allow_redirects=False) as other:
        assert other.headers["Location"] == "/evil.example/"


async def test_a_page_of_another_site_starts_nothing(run: Path, serve: Serve) -> None:
    client = await serve(run)
    response = await client.post("/api/runs/run/learner/0")
    assert (response.status, (await response.json())["error"]) == (403, "A request from another page is refused.")
    response = await client.post("/api/runs/run/learner/77", headers={"X-Gspo-View": "1"})
    assert response.status == 404
    assert (await answer(client, "/api/runs/run/learner/0"))["state"] == "missing"


async def test_every_answer_forbids_scripts_and_addresses_of_others(run: Path, serve: Serve) -> None:
    client = await serve(run)
    page = await (await client.get("/")).text()
    (script,) = re.findall(r'src="(/static/[0-9a-f]+/app.js)"', page)
    for path in ("/", "/api/runs", script, "/nothing", "/api/nothing", "/static/../server.py"):
        response = await client.get(path)
        assert "default-src 'none'; script-src 'self';" in response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert await refused(client, "/api/nothing", 404) == "there is nothing at this address"
    response = await client.get(script)
    assert (response.status, "immutable" in response.headers["Cache-Control"]) == (200, True)
    # Its imports are of the same release.
    assert f'from "{script.replace("app.js", "dom.js")}"' in await response.text()
    assert await refused(client, "/static/0/app.js", 404) == "there is nothing at this address"
    assert (
        await refused(client, f"{script.removesuffix('app.js')}%2e%2e%2fserver.py", 404)
        == "there is nothing at this address"
    )
    async with ClientSession() as session, session.put(client.make_url("/api/runs")) as response:
        assert response.status == 405


async def test_a_run_of_another_release_shows_what_metrics_say(run: Path, serve: Serve) -> None:
    connection = sqlite3.connect(run / LEDGER_FILE)
    connection.execute("PRAGMA user_version = 4")
    connection.close()
    client = await serve(run)
    assert "schema 4, this release reads 2" in (await answer(client, "/api/runs"))[0]["error"]
    for _ in range(2):  # Read anew, not once more.
        overview = await answer(client, "/api/runs/run/overview")
        assert "schema 4" in overview["error"]
        assert overview["columns"]["batch"] == [0, 1, 2]
        assert overview["dropped"] == {"failed": 1, "stale": 2}
    assert "schema 4" in await refused(client, "/api/runs/run/trajectories/1", 409)


async def test_a_run_that_is_half_gone_says_what_is_missing(run: Path, serve: Serve) -> None:
    client = await serve(run)
    (run / "settings.json").unlink()
    (run / "metrics.jsonl").unlink()
    overview = await answer(client, "/api/runs/run/overview")
    assert "settings.json: missing" in overview["facts"]["settings_error"]
    assert overview["columns"]["batch"] == [0, 1, 2]
    (run / LEDGER_FILE).unlink()
    assert "is no run directory" in await refused(client, "/api/runs/run/overview", 409)
    assert "is no run directory" in (await answer(client, "/api/runs"))[0]["error"]


async def test_a_damaged_trajectory_leaves_the_rest_readable(run: Path, serve: Serve) -> None:
    connection = sqlite3.connect(run / LEDGER_FILE)
    connection.execute("UPDATE chunks SET logprobs = zeroblob(length(logprobs)) WHERE trajectory_id = 3")
    connection.commit()
    connection.close()
    found = await answer(await serve(run), "/api/runs/run/trajectories/3")
    assert "trajectory 3: the chunk at 0 was changed on the disk" in found["damage"]
    assert found["group"]["members"]
    assert "ids" not in found


async def test_a_damaged_record_of_the_learner_leaves_the_rest_readable(run: Path, serve: Serve) -> None:
    (run / "learner-tokens").mkdir()
    (run / "learner-tokens" / "batch-000000001-rank-0000-of-0001.npz").write_bytes(b"no archive")
    client = await serve(run)
    batch = await answer(client, "/api/runs/run/groups?batch=1")
    assert "batch-000000001-rank-0000-of-0001.npz: not what a learner recorded" in batch["learner_error"]
    found = await answer(client, f"/api/runs/run/trajectories/{batch['groups'][0]['members'][0]['id']}")
    assert (found["learner_error"], found["learned"], bool(found["ids"])) == (batch["learner_error"], None, True)


async def test_looking_changes_no_file_of_the_run(run: Path, serve: Serve) -> None:
    def state() -> dict[str, bytes]:
        return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = state()
    client = await serve(run)
    for path in ("/api/runs", "/api/runs/run/overview", "/api/runs/run/groups?batch=0", "/api/runs/run/trajectories/5"):
        await answer(client, path)
    assert state() == before


async def test_a_run_where_nothing_can_be_written_is_opened_once_for_many_looks(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite may need a copy of the ledger there, which must not be made for every request."""
    monkeypatch.setattr(watched_run, "access", lambda path, mode: False)
    watched = WatchedRun("run", run, MonotonicClock())

    def look() -> OpenRun:
        with watched.opened() as opened:
            assert opened.facts().num_batches == 3
            return opened

    first, second = await watched.call(look), await watched.call(look)
    watched.close()
    assert first is second


async def test_half_sent_requests_keep_the_page_from_nobody(run: Path, tmp_path: Path) -> None:
    runs = watched_runs([run], MonotonicClock())
    server = ViewServer(runs, PageAnswers(runs, LearnerNumbers(tmp_path / "cache")), "")
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_until(stop, server, "127.0.0.1", 0, address.set_result))
        url = URL(await address)
        hostile = [await asyncio.open_connection(url.host, url.port) for _ in range(300)]
        for _, writer in hostile:
            writer.write(b"GET / HTTP/1.1\r\nHost: ")
        async with ClientSession() as honest, honest.get(url / "api/runs") as response:
            assert response.status == 200
        with suppress(ConnectionError):
            async with asyncio.timeout(5):
                assert await hostile[0][0].read() == b""
        for _, writer in hostile:
            writer.transport.abort()
        stop.set()
    for each in runs.values():
        each.close()
