"""What agents print is kept under the episode that printed it, and a flood costs nobody anything."""

import asyncio
from pathlib import Path

from gspo_services.tasks.agents import UserOutput
from tests.support.agent_pools import agent_pool, agent_task


async def test_lines_are_kept_under_their_episode(tmp_path: Path) -> None:
    async with agent_pool(output=tmp_path / "agents.log") as pool:
        worker = (await pool.solve(agent_task("process_id"))).reward
        assert worker is not None
        await asyncio.gather(*(pool.solve(agent_task("print_lines", seed=seed)) for seed in (5, 6)))
    lines = (tmp_path / "agents.log").read_text().splitlines()
    name = f"worker {int(worker)} episode"
    assert sorted(lines) == [
        f"{name} 2: and more",
        f"{name} 2: seed 5 says hello",
        f"{name} 3: and more",
        f"{name} 3: seed 6 says hello",
    ]


async def test_an_agent_that_prints_without_end_keeps_only_its_budget_and_the_others_theirs(tmp_path: Path) -> None:
    async with agent_pool(output=tmp_path / "agents.log", hang_s=30.0) as pool:
        flooded = await pool.solve(agent_task("print_endlessly"))
        assert flooded.reward == 1.0
        await pool.solve(agent_task("print_lines"))
    text = (tmp_path / "agents.log").read_text()
    assert "more than 65536 characters: the rest is left out" in text
    assert len(text) < 100_000
    assert text.endswith("seed 7 says hello\n" + text.splitlines()[-1] + "\n")


async def test_a_gigabyte_past_pythons_standard_output_neither_blocks_nor_stays(tmp_path: Path) -> None:
    async with agent_pool(output=tmp_path / "agents.log", hang_s=60.0) as pool:
        assert (await pool.solve(agent_task("flood"))).reward == 1.0
        assert (await pool.solve(agent_task("answer", value=1))).reward == 1.0
    assert "more than 1048576 bytes: the rest is left out" in (tmp_path / "agents.log").read_text()
    sizes = {path.name: path.stat().st_size for path in sorted(Path(tmp_path).glob("agents.log*"))}  # noqa: ASYNC240
    assert sum(sizes.values()) < 5 * 1024 * 1024, "a NUL is written as four characters"


def test_the_log_is_two_files_of_bounded_size_with_printable_lines(tmp_path: Path) -> None:
    output = UserOutput(tmp_path / "agents.log", max_bytes=1000)
    for number in range(100):
        output.write(f"worker {number}", "x" * 50 + "\x1b[2J")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"agents.log", "agents.log.1"}
    assert max(sizes.values()) <= 1000
    assert (tmp_path / "agents.log").read_text().splitlines()[-1] == "worker 99: " + "x" * 50 + "\\x1b[2J"


def test_a_log_that_cannot_be_written_is_lost_and_nothing_else(tmp_path: Path) -> None:
    UserOutput(tmp_path / "no_such_folder" / "agents.log").write("worker 1", "text")
    assert list(tmp_path.iterdir()) == []
