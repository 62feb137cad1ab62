"""The table of completions in real Chromium: orders, filters, search, keys, files, and what cannot be asked."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from gspo_services.runs.reading import open_run
from tests.support.view.shown_runs import BATCH, HOSTILE, ShownRuns

pytestmark = pytest.mark.view

NewPage = Callable[..., Page]


@pytest.fixture
def rewards(run: Path) -> dict[int, float]:
    """Of finished trajectories, in the ledger's order."""
    with open_run(run) as opened:
        return {each.trajectory_id: each.reward for each in opened.trajectories() if each.reward is not None}


def open_table(page: Page, query: str = "") -> Page:
    page.goto(f"/r/small/completions{query}")
    page.wait_for_selector("tr[data-id]")
    return page


def shown_ids(page: Page) -> list[int]:
    return [int(each.get_attribute("data-id") or "") for each in page.locator("tr[data-id]").all()]


def test_the_worst_and_the_best_are_one_click_away(server: ShownRuns, new_page: NewPage, rewards: dict[int, float]) -> None:
    page = open_table(new_page(server))
    assert shown_ids(page) == sorted(rewards, key=lambda each: (rewards[each], each))
    page.get_by_role("button", name="best first").click()
    page.wait_for_url("**/completions?order=down")
    expect(page.locator("tr[data-id]").first.locator("[data-label=reward]")).to_have_text("1")
    assert shown_ids(page) == sorted(rewards, key=lambda each: (-rewards[each], each))
    page.locator("[data-sort=length]").click()
    page.wait_for_url("**/completions?order=&sort=length") if "order=&" in page.url else page.wait_for_url("**sort=length*")
    lengths = page.locator("[data-label=length]")
    expect(page.locator("th[aria-sort=ascending]")).to_have_text("length ▲")
    found = [int(each) for each in lengths.all_inner_texts()]
    assert found == sorted(found)
    page.locator("[data-sort=length]").click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("length ▼")


def test_the_worst_of_a_batch_are_one_click_away_and_have_what_was_expected(
    run: Path, server: ShownRuns, new_page: NewPage
) -> None:
    page = new_page(server)
    page.goto(f"/r/small/batches/{BATCH}")
    expect(page.locator(".group [data-expected]").first).to_contain_text("+")
    expect(page.locator(".group .asks").first).to_contain_text(HOSTILE)
    page.get_by_role("link", name="Its worst completions").click()
    page.wait_for_url(f"**/completions?batch={BATCH}")
    expect(page.locator("tr[data-id]")).to_have_count(4)
    expect(page.locator("td[data-expected]").first).to_contain_text("+")
    with open_run(run) as opened:
        members = {member.trajectory_id for group in opened.groups_of_batch(BATCH) for member in group.members}
    assert set(shown_ids(page)) == members
    page.locator("a.pick").first.click()
    expect(page.locator("main")).to_contain_text("Expected: ")
    expect(page.locator("[data-expected]").first).to_contain_text("+")


def test_a_group_shows_the_end_of_its_prompt_where_the_question_is(server: ShownRuns, new_page: NewPage) -> None:
    page = new_page(server, width=200)
    page.goto(f"/r/small/batches/{BATCH}")
    asked = page.locator(".group .asks").first
    expect(asked).to_contain_text(HOSTILE)
    hidden, above = asked.evaluate("it => [it.scrollHeight - it.clientHeight, it.scrollTop]")
    assert hidden > 0
    assert abs(hidden - above) < 2


def test_filters_and_a_search_are_in_the_address_and_come_back_with_it(server: ShownRuns, new_page: NewPage) -> None:
    page = open_table(new_page(server))
    page.locator("input[name=text]").fill("8021")
    page.locator("input[name=text]").press("Enter")
    page.wait_for_url("**/completions?text=8021")
    expect(page.locator("tr[data-id]")).to_have_count(1)
    assert shown_ids(page) == [8]
    expect(page.locator("[role=status]").first).to_contain_text("1 found in 20 of 20 texts")
    again = open_table(new_page(server), "?text=8021")
    assert again.locator("input[name=text]").input_value() == "8021"
    again.locator("summary", has_text="Filters").click()
    again.locator("select[name=split]").select_option("eval")
    expect(again.locator("main")).to_contain_text("No completion is like that.")


def test_arrow_keys_go_through_the_rows(server: ShownRuns, new_page: NewPage) -> None:
    page = open_table(new_page(server))
    first, second = shown_ids(page)[:2]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator(f"tr[data-id='{second}'] a.pick")).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.locator(f"tr[data-id='{first}'] a.pick")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(f"Trajectory {first}")
    with page.expect_navigation(url="**/t/*"):
        page.keyboard.press("ArrowRight")
    expect(page.locator("h1")).to_have_text(f"Trajectory {first + 1}")
    page.keyboard.press("ArrowUp")
    page.wait_for_url("**/batches/*")


def test_the_chosen_rows_are_a_file(server: ShownRuns, new_page: NewPage, tmp_path: Path) -> None:
    page = open_table(new_page(server), f"?batch={BATCH}")
    with page.expect_download() as begun:
        page.get_by_role("link", name="JSON lines").click()
    begun.value.save_as(tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert begun.value.suggested_filename == "small.jsonl"
    assert [row["trajectory"] for row in rows] == shown_ids(page)
    assert all(HOSTILE in row["answer"] for row in rows)


@pytest.mark.parametrize(
    ("query", "said"),
    [("?first=4000", "There are only 20."), ("?sort=prompt", "sort is 'prompt': one of"), ("?least=x", "least is 'x'")],
)
def test_what_cannot_be_shown_says_why_and_leads_back(
    query: str, said: str, server: ShownRuns, new_page: NewPage, request: pytest.FixtureRequest
) -> None:
    page = new_page(server, quiet=False)
    page.goto(f"/r/small/completions{query}")
    expect(page.locator(".note:visible")).to_contain_text(said)
    page.get_by_role("link", name="The last page" if "first" in query else "Take all filters away").click()
    expect(page.locator("tr[data-id]")).to_have_count(20)
