"""Side effects of agents: each happens once, and a replay of the episode gets what was recorded."""

from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.agents import arguments_digest
from gspo_services.tasks.agents import RecordedStep
from tests.support.agent_pools import ListJournal, agent_pool, agent_task


def recorded(notes: Path, *values: int) -> list[RecordedStep]:
    """Steps as the agents of these tests take them: first, second, third."""
    names = {1: "first", 2: "second", 3: "third"}
    return [
        RecordedStep(names[value], arguments_digest((str(notes), names[value], value)), {"value": value}) for value in values
    ]


@pytest.mark.parametrize(
    ("known", "written", "calls"),
    [
        ([], ["first", "second"], [("record", "first", 0, {"value": 1}), ("record", "second", 1, {"value": 2})]),
        ([1], ["second"], [("record", "second", 1, {"value": 2})]),
        ([1, 2], [], []),
    ],
)
async def test_a_recorded_step_is_not_done_again(
    tmp_path: Path, known: list[int], written: list[str], calls: list[Any]
) -> None:
    notes = tmp_path / "notes"
    journal = ListJournal(*recorded(notes, *known))
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("two_steps", notes=str(notes)), journal)
    assert result.components == {"first": 1.0, "second": 2.0, "was_replay": float(bool(known)), "is_replay": 0.0}
    assert lines_of(notes) == written
    assert journal.calls == calls


async def test_a_step_of_another_name_ends_the_replay(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    journal = ListJournal(*recorded(notes, 1, 2, 3))
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("other_steps", notes=str(notes)), journal)
    assert result.components == {"first": 1.0, "other": 20.0, "third": 30.0}
    assert lines_of(notes) == ["other", "third"]
    assert journal.calls == [
        ("diverged", 1, "second", "other"),
        ("record", "other", 1, {"value": 20}),
        ("record", "third", 2, {"value": 30}),
    ]


async def test_a_step_with_other_arguments_ends_the_replay(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    first, second = recorded(notes, 1, 2)
    journal = ListJournal(first, second._replace(arguments=first.arguments))
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("two_steps", notes=str(notes)), journal)
    assert (result.components["second"], lines_of(notes)) == (2.0, ["second"])
    assert journal.calls == [("diverged", 1, "second", "second"), ("record", "second", 1, {"value": 2})]


def test_arguments_count_by_value_or_else_by_type() -> None:
    circle: list[Any] = []
    circle.append(circle)
    alike = [({"a": 1, "b": 2},), ({"b": 2, "a": 1},)], [(object(),), (object(),)], [(circle,), (circle,)]
    for one, other in alike:
        assert arguments_digest(one) == arguments_digest(other)
    different: list[tuple[Any, ...]] = [
        (),
        (1,),
        ("1",),
        (1, 2),
        ([1, 2],),
        (None,),
        (object(),),
        (circle,),
        ({1: {2}, "x": 0},),
    ]
    assert len({arguments_digest(each) for each in different}) == len(different)


async def test_a_plain_function_takes_its_steps_in_its_thread(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    journal = ListJournal(*recorded(notes, 1))
    async with agent_pool("act_in_thread") as pool:
        result = await pool.solve(agent_task("steps_in_thread", notes=str(notes)), journal)
    assert (result.reward, lines_of(notes)) == (2.0, ["second"])
    assert journal.calls == [("record", "second", 1, {"value": 2})]


async def test_an_agent_waits_until_its_step_is_durable(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    class Looking(ListJournal):
        async def record(self, step: RecordedStep, ordinal: int) -> None:
            self.calls.append((step.name, lines_of(notes)))

    journal = Looking()
    async with agent_pool() as pool:
        await pool.solve(agent_task("two_steps", notes=str(notes)), journal)
    assert journal.calls == [("first", ["first"]), ("second", ["first", "second"])]


async def test_a_journal_that_fails_ends_the_episode_and_nothing_else() -> None:
    class Failing(ListJournal):
        async def record(self, step: RecordedStep, ordinal: int) -> None:
            raise ConnectionError("the lease is lost")

    async with agent_pool(episodes_per_worker=1) as pool:
        worker = (await pool.solve(agent_task("process_id"))).reward
        with pytest.raises(ConnectionError, match="lease is lost"):
            await pool.solve(agent_task("step_fails_once"), Failing())
        assert (await pool.solve(agent_task("process_id"))).reward == worker


async def test_a_step_that_raises_is_not_recorded_and_may_be_tried_again() -> None:
    journal = ListJournal()
    async with agent_pool() as pool:
        result = await pool.solve(agent_task("step_fails_once"), journal)
    assert (result.reward, journal.calls) == (1.0, [("record", "fetch", 0, 1)])


@pytest.mark.parametrize(
    ("do", "detail"),
    [
        ("steps_at_once", 'step "b" begins while "a" is under way'),
        ("step_of_an_object", 'the result of step "make" holds a object'),
        ("step_too_large", 'the result of step "read" has 2000002 bytes'),
    ],
)
async def test_what_cannot_be_replayed_is_an_error_in_the_users_line(do: str, detail: str) -> None:
    journal = ListJournal()
    async with agent_pool() as pool:
        result = await pool.solve(agent_task(do), journal)
    assert (result.failure, detail in result.detail, f"in {do}" in result.detail) == ("raised", True, True), result.detail
    assert [call for call in journal.calls if call[1] in ("b", "make", "read")] == []


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
