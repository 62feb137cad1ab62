"""What the browser shows of texts that move, hide, turn round or grow: all of it visible, in its place and in order."""

import unicodedata
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.view.shown_runs import WILD, WILD_LOG, ShownRuns, shown, write_shown_run

pytestmark = pytest.mark.view

NewPage = Callable[..., Page]
VIEWS = (
    "/r/wild",
    "/r/wild/completions",
    "/r/wild/batches/1",
    "/r/wild/t/8",
    "/r/wild/t/0",
    "/r/wild/tasks/train/3",
    "/r/wild/groups?status=dropped",
)
MOST_MARKS = 6
OUTSIDE = """() => {
  const found = [];
  for (const card of document.querySelectorAll(".card, .note, .figure, .member, .badge")) {
    const box = card.getBoundingClientRect();
    if (card.closest(".scroll")) continue;
    for (const each of card.querySelectorAll("*")) {
      const inner = each.getBoundingClientRect();
      if (!inner.width || each.closest(".scroll")) continue;
      if (inner.right > box.right + 4 || inner.left < box.left - 4 || inner.bottom > box.bottom + 4)
        found.push(`${each.className || each.tagName}: ${each.textContent.slice(0, 40)}`);
    }
    if (card.scrollWidth > card.clientWidth + 4) found.push(`${card.className}: ${card.scrollWidth}`);
  }
  return found;
}"""
BACKWARDS = """() => {
  const found = [];
  const spans = [...document.querySelectorAll(".tk")];
  for (let at = 1; at < spans.length; at++) {
    if (spans[at].parentNode !== spans[at - 1].parentNode) continue;
    const [one, other] = [[...spans[at - 1].getClientRects()].at(-1), spans[at].getClientRects()[0]];
    if (one && other && Math.abs(one.top - other.top) < 4 && other.left < one.left) found.push(at);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownRuns]:
    directory = tmp_path_factory.mktemp("shown") / "wild"
    write_shown_run(directory, WILD, WILD_LOG)
    with shown([directory], tmp_path_factory.mktemp("cache")) as server:
        yield server


def hidden(text: str) -> set[str]:
    """Characters that do not show themselves. A joiner between pictures is one picture's."""
    kept = text.replace("\U0001f468\u200d\U0001f469", "")
    return {each for each in kept if unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp") and each not in "\n\t"}


def most_marks(text: str) -> int:
    longest = run = 0
    for each in text:
        run = run + 1 if unicodedata.category(each).startswith("M") else 0
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("address", VIEWS)
def test_wild_text_is_shown_in_its_place_and_in_order(address: str, width: int, wild: ShownRuns, new_page: NewPage) -> None:
    page = new_page(wild, width)
    page.goto(address)
    page.wait_for_selector("main[data-ready]")
    if address.endswith("/completions"):
        page.wait_for_selector("tr[data-id]")
    for details in page.locator("details").all():
        details.evaluate("each => { each.open = true }")
    text = page.evaluate("document.body.textContent")
    assert hidden(text) == set()
    assert most_marks(text) <= MOST_MARKS
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(BACKWARDS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "owned" not in page.title()
    assert page.locator("main img, main script").count() == 0


def test_what_does_not_show_itself_is_written_out(wild: ShownRuns, new_page: NewPage) -> None:
    page = new_page(wild)
    shown_text: list[str] = []
    for trajectory in (6, 7, 8):  # Each has four of the texts.
        page.goto(f"/r/wild/t/{trajectory}")
        page.wait_for_selector("main[data-ready]")
        shown_text += page.locator(".tokens").all_inner_texts()
    written = [
        "\\x1b[2J\\x1b]0;owned\\x07",
        "\\x9b31m\\x85\\r",
        "\\u202egnorw",
        "\\u2066\\u2067\\u200f",
        "a\\u200bb\\u2060\\ufeff\\u200d",
        "nul\\x00",
    ]
    everything = "".join(shown_text).replace("\\x0d", "\\r")
    assert [each for each in written if each not in everything] == []
    assert "(394 more marks)" in everything
    assert "\U0001f468\u200d\U0001f469" in everything, "a family is one picture"
    page.locator(".tk", has_text="gnorw").first.hover()
    expect(page.locator("#tip")).to_contain_text("\\u202egnorw si sihT")
    expect(page.locator("#leases")).to_contain_text("\\ud800")


@pytest.mark.parametrize("address", ["/r/wild/completions", "/r/wild/batches/1", "/r/wild/t/8", "/r/wild/tasks/train/3"])
def test_what_was_expected_is_shown_like_any_other_text(address: str, wild: ShownRuns, new_page: NewPage) -> None:
    page = new_page(wild, 400)
    names = [f"train:{task}" for task in range(30)]

    def answer(route: Route) -> None:
        route.fulfill(json={"expected": dict.fromkeys(names, "".join(WILD)), "error": "".join(WILD)})

    page.route("**/expected?*", answer)
    page.goto(address)
    expect(page.locator("[data-expected]").first).to_contain_text("\\x1b[2J")
    for details in page.locator("details").all():
        details.evaluate("each => { each.open = true }")
    text = page.evaluate("document.body.textContent")
    assert hidden(text) == set()
    assert most_marks(text) <= MOST_MARKS
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()
