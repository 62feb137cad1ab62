"""Each view of the page, opened, filtered and followed by links in real Chromium, wide and narrow."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from gspo_services.broker.store import LEDGER_FILE
from tests.support.broker.ledger import LEARNER, LedgerHarness
from tests.support.processes.small_run import FIRST
from tests.support.view.shown_runs import BATCH, HOSTILE, ShownRuns, recorded_part, shown, write_self_play

pytestmark = pytest.mark.view

NewPage = Callable[..., Page]
VIEWS = {
    "/r/small": "small",
    "/r/small/completions": "Completions",
    f"/r/small/batches/{BATCH}": f"Batch {BATCH}",
    "/r/small/groups?status=dropped": "Groups",
    "/r/small/t/8": "Trajectory 8",
    "/r/small/tasks/train/3": "Task 3",
}


def open_view(page: Page, address: str) -> Page:
    page.goto(address)
    page.wait_for_selector("main[data-ready]")
    return page


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("address", VIEWS)
def test_each_view_opens_and_fits_the_window(address: str, width: int, server: ShownRuns, new_page: NewPage) -> None:
    page = open_view(new_page(server, width), address)
    expect(page.locator("h1")).to_contain_text(VIEWS[address])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "false" not in page.locator("main").inner_text().replace("false|", "").split()


def test_links_lead_from_a_run_to_a_token_and_back(server: ShownRuns, new_page: NewPage) -> None:
    page = open_view(new_page(server), "/r/small")
    page.get_by_role("link", name="Dropped").click()
    page.wait_for_url("**/groups?status=dropped")
    expect(page.locator(".group")).to_have_count(3)
    page.locator("[data-trajectory='1']").click()
    page.wait_for_url("**/t/1")
    expect(page.locator("#leases")).to_contain_text("rollout-0")
    expect(page.locator("main")).to_contain_text("its group was dropped: failed")
    page.locator(".group .member:not(.here)").first.click()
    expect(page.locator("h1")).to_contain_text("Trajectory 0")
    page.go_back()
    expect(page.locator("h1")).to_contain_text("Trajectory 1")
    page.get_by_role("link", name="Task", exact=False).first.click()
    page.wait_for_url("**/tasks/train/*")


def test_a_filter_and_an_order_are_in_the_address_and_come_back_with_it(server: ShownRuns, new_page: NewPage) -> None:
    page = open_view(new_page(server), f"/r/small/batches/{BATCH}")
    expect(page.locator(".group")).to_have_count(2)
    page.locator("select[name=only]").select_option("clipped")
    page.locator("select[name=sort]").select_option("clipped")
    expect(page.locator(".group")).to_have_count(1)
    assert page.url.endswith(f"/r/small/batches/{BATCH}?only=clipped&sort=clipped")
    again = open_view(new_page(server), page.url.removeprefix(server.address))
    expect(again.locator(".group")).to_have_count(1)
    assert again.locator("select[name=sort]").input_value() == "clipped"
    again.locator("select[name=only]").select_option("silent")
    expect(again.locator("main")).to_contain_text("No group is like that.")


def test_a_clipped_sequence_is_explained_with_the_learners_numbers(run: Path, server: ShownRuns, new_page: NewPage) -> None:
    part = recorded_part(run, BATCH)
    column = {name: part.stats_SC[0, at] for at, name in enumerate(part.columns)}
    page = open_view(new_page(server), f"/r/small/t/{part.trajectories_S[0]}?colour=clip")
    explained = page.locator(".explain")
    expect(explained).to_have_attribute("data-clipped", "yes")
    expect(explained).to_contain_text("It lies above the range, and its advantage is positive")
    page.get_by_text("All numbers").click()

    def shown_number(name: str) -> float:
        return float(page.locator(f"[data-number='{name}']").inner_text())

    assert shown_number("n") == column["num_tokens_S"]
    for name, field in {"log s": "log_ratio_S", "lag": "lag_S", "advantage": "advantage_S"}.items():
        assert math.isclose(shown_number(name), column[field], rel_tol=1e-6, abs_tol=1e-9)
    low, high = page.locator("[data-number='clip range']").inner_text().split(" to ")
    assert (float(low), float(high)) == (column["clip_low_S"], column["clip_high_S"])
    assert page.locator(".tk.clipped").count() == part.counts_S[0]
    page.locator(".tk.clipped").first.hover()
    expect(page.locator("#tip")).to_contain_text("at the upper bound")


def test_a_game_against_itself_shows_who_played_what_and_each_ones_reward(tmp_path: Path, new_page: NewPage) -> None:
    black = write_self_play(tmp_path / "game")
    with shown([tmp_path / "game"], tmp_path / "cache") as server:
        page = open_view(new_page(server, 400), f"/r/game/t/{black}")
        expect(page.locator(".turn.model .who").first).to_contain_text("Policy as black")
        expect(page.locator(f"[data-trajectory='{black}']")).to_contain_text("white 1")
        expect(page.locator(f"[data-trajectory='{black}']")).to_contain_text("black -0.75")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        open_view(page, "/r/game/completions")
        expect(page.locator("td[data-label='black']").first).to_have_text("-0.750")


def test_text_of_a_run_is_never_markup(server: ShownRuns, new_page: NewPage) -> None:
    page = open_view(new_page(server), "/r/small/t/8")
    expect(page.locator(".said").first).to_contain_text(HOSTILE)
    open_view(page, "/r/small/tasks/train/3")
    expect(page.locator(".says").first).to_contain_text(HOSTILE)
    assert page.locator("main img, main script").count() == 0
    open_view(page, "/r/small/completions")
    expect(page.locator("a.pick").first).to_contain_text(HOSTILE)
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()


def test_colours_follow_the_choice_and_the_theme_stays(server: ShownRuns, new_page: NewPage) -> None:
    page = open_view(new_page(server, scheme="dark"), "/r/small/t/8")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("button[data-way=version]").click()
    assert page.url.endswith("/r/small/t/8?colour=version")
    colour = page.locator(".tk:not(.off)").first.evaluate("each => each.style.backgroundColor")
    assert colour != ""
    page.get_by_role("button", name="Light or dark").click()
    page.reload()
    page.wait_for_selector("main[data-ready]")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_a_live_run_is_followed(tmp_path: Path, new_page: NewPage) -> None:
    directory = tmp_path / "live"
    directory.mkdir()
    broker = LedgerHarness(path=directory / LEDGER_FILE)
    broker.hello(FIRST)
    broker.hello(LEARNER, "learner")
    broker.publish(1, 0)
    with shown([directory], tmp_path / "cache") as server:
        page = open_view(new_page(server), "/")
        expect(page.locator("h1 .badge.live")).to_be_visible()
        expect(page.locator("#waits")).to_contain_text("waits for a rollout")
        before = page.locator(".figure").first.inner_text()
        for _ in range(2):
            for lease in broker.lease(FIRST, 4):
                broker.episode(FIRST, lease, 1, reward=float(lease.trajectory_id % 2))
        broker.request_batch(0, 1)
        broker.publish(2, 1)
        broker.trained(0, 2)
        expect(page.locator(".figure").first).to_contain_text("1\n", timeout=20_000)
        assert page.locator(".figure").first.inner_text() != before
        expect(page.locator("#waits")).to_have_count(0)
    broker.store.close()
