"""A run of a million trajectories: how soon something is seen, and what the server needs for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Page, expect

from gspo_services.runs.reading import open_run
from tests.support.view.shown_runs import shown

pytestmark = pytest.mark.view

FIRST_PAINT_S: Final = 1.0
TRAJECTORY_S: Final = 0.5
WORST_S: Final = 1.0
INDEX_MS: Final = 180_000
MEMORY_BYTES: Final = 300 << 20
SHOWN_AFTER: Final = """() => performance.now() / 1000"""
OPEN_FIRST: Final = """async () => {
  const start = performance.now();
  document.querySelector("[data-trajectory]").click();
  while (!document.querySelector("#leases")) await new Promise(requestAnimationFrame);
  return (performance.now() - start) / 1000;
}"""
"""Seconds from the click on a trajectory until it is drawn."""
WORST: Final = """async ([sort, order]) => {
  const start = performance.now();
  const found = await (await fetch(`/api/runs/big/completions?most=10&sort=${sort}&order=${order}`)).json();
  return [(performance.now() - start) / 1000, found.rows.map((row) => [row.reward, row.id]), found.number];
}"""
"""Seconds of an answer, its rows, and of how many completions they are the first."""


def test_a_million_trajectories_are_shown_at_once_in_little_memory(
    big: Path, tmp_path: Path, new_page: Callable[..., Page]
) -> None:
    with open_run(big) as run:
        facts = run.facts()
    with shown([big], tmp_path / "cache") as server:
        page = new_page(server)
        # The browser's own start is not the page's.
        page.goto("/nothing")
        page.goto("/r/big")
        page.wait_for_selector("[data-chart=Reward] path")
        painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
        drawn = page.evaluate(SHOWN_AFTER)
        trajectory = facts.num_trajectories // 2
        page.goto(f"/r/big/t/{trajectory}")
        page.wait_for_selector("#leases")
        loaded = page.evaluate(SHOWN_AFTER)
        expect(page.locator("h1")).to_contain_text(f"Trajectory {trajectory}")
        page.goto(f"/r/big/batches/{facts.num_batches - 1}")
        page.wait_for_selector(".group")
        opened = page.evaluate(OPEN_FIRST)
        page.goto("/r/big/tasks/eval/7")
        page.wait_for_selector(".answer")
        page.goto("/r/big/groups?status=batched&first=1000")
        page.wait_for_selector(".group")
        # A bar shows how far the index is; then the table is whole.
        page.goto("/r/big/completions")
        page.wait_for_selector("a[download]", timeout=INDEX_MS)
        indexed = page.evaluate(SHOWN_AFTER)
        expect(page.locator("tr[data-id]")).to_have_count(50)
        answers = [
            page.evaluate(WORST, [sort, order]) for sort, order in (("reward", "up"), ("reward", "down"), ("length", "up"))
        ]
        memory = server.memory_bytes
    print(
        f"{facts.num_trajectories:,} trajectories: first paint {painted:.2f} s, curves after {drawn:.2f} s, a trajectory "
        f"{opened:.2f} s after a click and {loaded:.2f} s after its address was entered, {memory >> 20} MiB"
    )
    assert painted < FIRST_PAINT_S
    assert opened < TRAJECTORY_S
    assert memory < MEMORY_BYTES
    seconds = [round(each[0], 3) for each in answers]
    print(f"all are indexed {indexed:.1f} s after the table was opened; then the first ten of each order take {seconds} s")
    assert max(seconds) < WORST_S
    wanted = [each for each in range(100) if (each * 7919) % 5 >= 2]
    assert answers[0][1:] == [[[0.0, each] for each in wanted[:10]], facts.num_trajectories]
    assert answers[1][1] == [[1.0, each] for each in range(100) if (each * 7919) % 5 < 2][:10]
