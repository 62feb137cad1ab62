"""All completions of a run: in every order, filtered, searched, while the run grows, and as files."""

import io
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from gspo_services.broker.store import LEDGER_FILE
from gspo_services.runs.reading import open_run
from gspo_services.runs.view.completions import CompletionIndex, Completions
from tests.support.broker.ledger import LEARNER, LedgerHarness
from tests.support.processes.small_run import FIRST, write_small_run
from tests.support.view.served import Client, Serve, answer, refused
from tests.support.view.shown_runs import BATCH, HOSTILE, write_shown_run

PATH = "/api/runs/run/completions"


@pytest.fixture(scope="module")
def shown_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("view") / "run"
    write_shown_run(directory, (2 * HOSTILE, "\U0001f600 plain "))
    return directory


@pytest.fixture
def run(shown_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shown_run, tmp_path / "run"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LedgerHarness]:
    """A broker in RUN that has published a version."""
    (tmp_path / "run").mkdir()
    broker = LedgerHarness(path=tmp_path / "run" / LEDGER_FILE)
    broker.hello(FIRST)
    broker.hello(LEARNER, "learner")
    broker.publish(1, 0)
    yield broker
    broker.store.close()


def generate(broker: LedgerHarness, number: int) -> None:
    for lease in broker.lease(FIRST, number):
        broker.episode(FIRST, lease, 1, reward=float(lease.trajectory_id % 2))


def ids(found: dict[str, Any]) -> list[int]:
    return [row["id"] for row in found["rows"]]


@pytest.mark.parametrize(("sort", "field"), [("reward", "reward"), ("length", "num_action_tokens"), ("lag", "lag")])
async def test_every_order_is_that_of_the_ledgers_own_rows(sort: str, field: str, tmp_path: Path, serve: Serve) -> None:
    write_small_run(tmp_path / "run")
    with open_run(tmp_path / "run") as opened:
        rows = [each for each in opened.trajectories() if each.status == "finished"]
    client = await serve(tmp_path / "run")
    for order, sign in (("up", 1), ("down", -1)):
        known = [each for each in rows if getattr(each, field) is not None]
        wanted = sorted(known, key=lambda each: (sign * getattr(each, field), each.trajectory_id))
        unknown = sorted(each.trajectory_id for each in rows if getattr(each, field) is None)
        found = await answer(client, f"{PATH}?sort={sort}&order={order}&most=200")
        assert ids(found) == [each.trajectory_id for each in wanted] + unknown
        assert (found["read"], found["total"], found["number"]) == (found["total"], found["total"], len(rows))
    worst = found["rows"][-1] if sort != "lag" else found["rows"][0]
    with open_run(tmp_path / "run") as opened:
        member = opened.trajectory(worst["id"])
        assert member is not None
        assert (worst["reward"], worst["lag"], worst["length"]) == (member.reward, member.lag, member.num_action_tokens)


async def test_pages_follow_each_other_and_one_beyond_the_end_says_how_many_there_are(run: Path, serve: Serve) -> None:
    client = await serve(run)
    everything = ids(await answer(client, f"{PATH}?most=200"))
    first = await answer(client, f"{PATH}?most=15")
    second = await answer(client, f"{PATH}?most=15&first={first['next']}&until={first['newest']}")
    assert (ids(first) + ids(second), second["next"]) == (everything, None)
    beyond = await answer(client, f"{PATH}?first=999999")
    assert (beyond["rows"], beyond["number"], beyond["next"]) == ([], len(everything), None)


async def test_filters_choose_by_what_is_recorded(run: Path, serve: Serve) -> None:
    client = await serve(run)

    async def chosen(query: str) -> list[int]:
        return ids(await answer(client, f"{PATH}?most=200&sort=trajectory&{query}"))

    with open_run(run) as opened:
        members = {member.trajectory_id: (group, member) for group in opened.groups() for member in group.members}
    finished = {id_: pair for id_, pair in members.items() if pair[1].status == "finished"}
    assert await chosen("batch=1") == [id_ for id_, (group, _) in finished.items() if group.batch == 1]
    assert await chosen("task=2") == [id_ for id_, (group, _) in finished.items() if group.task_index == 2]
    assert await chosen("status=dropped") == [id_ for id_, (group, _) in finished.items() if group.status == "dropped"]
    assert await chosen("least=0.5&largest=1.5") == [id_ for id_, (_, member) in finished.items() if member.reward == 1]
    assert await chosen("split=eval") == []
    assert await chosen("which=all") == [id_ for id_, (_, member) in members.items() if member.num_action_tokens]
    first = ids(await answer(client, f"{PATH}?batch={BATCH}&sort=clipped&order=down"))[0]
    assert await chosen("clipped=yes") == [first], "the learner recorded one clipped sequence"


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("sort=prompt", "sort is 'prompt': one of reward, length"),
        ("sort=component/style", "sort is 'component/style': the rewards read so far have these components: none"),
        ("order=sideways", "order is 'sideways': one of up, down"),
        ("status=lost", "status is 'lost': one of open, complete"),
        ("least=many", "least is 'many': expected a number"),
        ("least=nan", "least is 'nan': expected a number"),
        ("batch=-1", "batch is '-1': expected a number"),
        ("first=1e9", "first is '1e9': expected a number"),
        ("most=100000", "most is 100000: 1 to 200"),
        (f"text={'x' * 501}", "text has 501 characters: at most 500"),
    ],
)
async def test_what_cannot_be_asked_is_named_with_what_can(query: str, error: str, run: Path, serve: Serve) -> None:
    assert (await refused(await serve(run), f"{PATH}?{query}", 400)).startswith(error)


async def test_a_search_finds_the_worst_first_and_says_how_far_it_came(
    run: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is, one answer looks through all texts.
    monkeypatch.setattr("gspo_services.runs.view.completions.table.READ_S", 60.0)
    client = await serve(run)
    plain = await answer(client, f"{PATH}?most=200")
    # The third token of an answer to trajectory 5 is 5021.
    wanted = [row["id"] for row in plain["rows"] if row["length"] >= 3]
    assert 0 < len(wanted) < len(plain["rows"])
    found = await answer(client, f"{PATH}?most=200&text=021")
    assert (ids(found), found["next"]) == (wanted, None)
    one = await answer(client, f"{PATH}?most=1&text=021")
    assert ids(one) == wanted[:1]
    rest = await answer(client, f"{PATH}?most=200&text=021&first={one['next']}")
    assert ids(rest) == wanted[1:]
    assert ids(await answer(client, f"{PATH}?most=200&text=ONERROR")) == ids(plain), "whatever its case"


async def test_a_run_that_grows_is_followed_and_its_pages_stay(live: LedgerHarness, tmp_path: Path, serve: Serve) -> None:
    client = await serve(tmp_path / "run")
    assert (await answer(client, PATH))["rows"] == []
    leases = live.lease(FIRST, 2)
    live.grow(FIRST, leases[0], 3, 1)
    assert ids(await answer(client, f"{PATH}?which=all")) == [leases[0].trajectory_id]
    assert ids(await answer(client, PATH)) == [], "it is not finished"
    live.finish(FIRST, leases[0], 3, 0.0)
    live.episode(FIRST, leases[1], 1, reward=1.0)
    first = await answer(client, PATH)
    assert [(row["id"], row["reward"], row["group_status"]) for row in first["rows"]] == [
        (leases[0].trajectory_id, 0.0, "complete"), (leases[1].trajectory_id, 1.0, "complete"),
    ]  # fmt: skip
    generate(live, 2)
    live.request_batch(0, 1)
    later = await answer(client, PATH)
    assert {row["group_status"] for row in later["rows"]} == {"batched"}
    assert {row["lag"] for row in later["rows"]} == {0.0}
    assert len(later["rows"]) == 4
    assert sorted(ids(await answer(client, f"{PATH}?until={first['newest']}"))) == sorted(ids(first))


async def test_a_run_that_was_put_back_is_read_anew(run: Path, serve: Serve) -> None:
    client = await serve(run)
    before = await answer(client, f"{PATH}?most=200")
    last = max(ids(before))
    with sqlite3.connect(run / LEDGER_FILE) as connection:
        connection.execute("DELETE FROM trajectories WHERE trajectory_id = ?", (last,))
    connection.close()
    after = await answer(client, f"{PATH}?most=200")
    assert (ids(after), after["total"]) == ([each for each in ids(before) if each != last], before["total"] - 1)


async def test_damage_costs_one_row(run: Path, serve: Serve) -> None:
    with sqlite3.connect(run / LEDGER_FILE) as connection:
        connection.execute("UPDATE trajectories SET num_tokens = 'many' WHERE trajectory_id = 5")
        connection.execute("UPDATE trajectories SET turn_rewards = '[0.25]' WHERE trajectory_id = 6")
        connection.execute("UPDATE chunks SET logprobs = zeroblob(length(logprobs)) WHERE trajectory_id = 7")
    connection.close()
    found = await answer(await serve(run), f"{PATH}?most=200")
    rows = {row["id"]: row for row in found["rows"]}
    assert (found["damaged"], 5 in rows) == (1, False)
    assert "was changed on the disk" in rows[6]["damage"]
    assert "the chunk at 0 was changed on the disk" in rows[7]["damage"]
    assert (rows[8]["damage"], bool(rows[8]["answer"])) == ("", True)


async def download(client: Client, query: str) -> bytes:
    response = await client.get(f"{PATH}.{query}")
    assert response.status == 200, await response.text()
    assert "attachment" in response.headers["Content-Disposition"]
    return await response.read()


async def test_a_file_has_every_row_with_whole_texts(run: Path, serve: Serve) -> None:
    client = await serve(run)
    wanted = await answer(client, f"{PATH}?most=200&order=down")
    table = pyarrow.parquet.read_table(io.BytesIO(await download(client, "parquet?order=down"))).to_pylist()
    lines = [json.loads(line) for line in (await download(client, "jsonl?order=down")).splitlines()]
    assert table == lines
    assert [row["trajectory"] for row in table] == ids(wanted)
    assert [row["reward"] for row in table] == [row["reward"] for row in wanted["rows"]]
    assert all(row["expected"] for row in table)
    longest = max(table, key=lambda row: len(row["answer"]))
    assert len(longest["answer"]) > 320
    assert " … " not in longest["answer"]
    only = [json.loads(line) for line in (await download(client, "jsonl?text=021")).splitlines()]
    assert [row["trajectory"] for row in only] == ids(await answer(client, f"{PATH}?most=200&text=021"))
    assert "sort is 'x'" in await refused(client, f"{PATH}.parquet?sort=x", 400)
    assert "there are jsonl, parquet" in await refused(client, f"{PATH}.csv", 404)


async def test_what_was_expected_is_known_by_task(run: Path, serve: Serve) -> None:
    client = await serve(run)
    found = await answer(client, "/api/runs/run/expected?task=train:3&task=eval:1&task=eval/gone:0")
    assert found["expected"].keys() == {"train:3", "eval:1"}
    assert "the settings have no evaluation set 'gone'" in found["error"]
    for task in ("train", "train:x", "test:1", ":1"):
        assert "task is" in await refused(client, f"/api/runs/run/expected?task={task}", 400)
    group = (await answer(client, "/api/runs/run/groups?batch=1"))["groups"][0]
    assert group["source"] == "train"
    prompts = await answer(client, f"/api/runs/run/prompts?id={group['members'][0]['id']}&id=999")
    assert prompts["prompts"][str(group["members"][0]["id"])]
    assert prompts["prompts"]["999"] == ""
    (run / "settings.json").unlink()
    other = await answer(await serve(run), "/api/runs/run/expected?task=train:3")
    assert (other["expected"], "settings.json: missing" in other["error"]) == ({}, True)


async def test_before_everything_is_read_there_is_no_worst(run: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await serve(run)
    assert (await answer(client, PATH))["rows"]
    monkeypatch.setattr(Completions, "read", lambda self, opened: False)
    found = await answer(client, PATH)
    assert (found["rows"], found["is_whole"], found["read"]) == ([], False, 22)


def test_an_index_goes_on_where_its_time_was_over(run: Path) -> None:
    index = CompletionIndex(run)
    with open_run(run) as opened:
        index.read(opened, lambda: False)
        assert (index.number, index.total, index.is_complete) == (0, 22, False)
        index.read(opened, lambda: True)
        revision = index.revision
        index.read(opened, lambda: True)
    assert (index.number, index.is_complete, index.revision) == (22, True, revision), "nothing was left to read"
