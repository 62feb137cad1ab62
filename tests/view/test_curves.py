"""Curves of a page: any metric, smoothed, zoomed, on a log axis; two runs; keys and contrast."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from gspo_services.shared.settings import override_settings, read_run_settings, write_run_settings
from tests.support.view.shown_runs import BATCH, ShownRuns, shown, write_shown_run

pytestmark = pytest.mark.view

NewPage = Callable[..., Page]
LEAST_CONTRAST = 4.5
FAINT = """(least) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((each) => each / 255);
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((each, at) => each * a + below[at] * (1 - a));
  const linear = (each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const own = (element) => rgba(getComputedStyle(element).backgroundColor);
  const ground = (element) => (element ? over(own(element), ground(element.parentElement)) : [1, 1, 1]);
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!says || !element.getClientRects().length || element.closest("[hidden], noscript, .special, [disabled]")) continue;
    const style = getComputedStyle(element);
    const below = ground(element);
    const ink = rgba(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [one, other] = [over(ink, below), below].map(light);
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < least) found.push(`${element.outerHTML.slice(0, 60)} ${contrast.toFixed(2)}`);
  }
  return [...new Set(found)];
}"""
"""Texts that are too faint on their ground."""


@pytest.fixture(scope="module")
def two(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownRuns]:
    directory = tmp_path_factory.mktemp("two") / "other"
    write_shown_run(directory)
    settings = override_settings(read_run_settings(directory), ["objective.eps_high=0.125", "batch.max_lag=7"])
    write_run_settings(settings)
    with shown([run, directory], tmp_path_factory.mktemp("cache")) as server:
        yield server


def open_curves(page: Page, address: str) -> Page:
    page.goto(address)
    page.wait_for_selector("main[data-ready]")
    return page


def test_any_metric_can_be_picked_and_stays_in_the_address(server: ShownRuns, new_page: NewPage) -> None:
    page = open_curves(new_page(server), "/r/small")
    field = page.locator("input[name=metric]")
    field.click()
    expect(page.locator("datalist option[value='lag/max']")).to_have_count(1)
    field.fill("lag/max")
    field.press("Enter")
    expect(page.locator("[data-chart='lag/max'] path")).to_have_count(1)
    again = open_curves(new_page(server), page.url.removeprefix(server.address))
    expect(again.locator("[data-chart='lag/max'] path")).to_have_count(1)
    again.get_by_role("button", name="without lag/max").click()
    expect(again.locator("[data-chart='lag/max']")).to_have_count(0)
    missing = open_curves(new_page(server), "/r/small?m=no/such&smooth=x&from=y&to=1")
    expect(missing.locator("[data-chart='no/such']")).to_contain_text("no line of metrics.jsonl has no/such")


def test_curves_are_smoothed_zoomed_and_on_a_log_axis(server: ShownRuns, new_page: NewPage) -> None:
    page = open_curves(new_page(server), "/r/small?m=num_tokens")
    chart = page.locator("[data-chart='num_tokens']")
    lengths = page.locator("[data-chart='Length, tokens a trajectory'] path").first
    plain = lengths.get_attribute("d")
    page.locator("select[name=smooth]").select_option("5")
    expect(chart.locator("path")).to_have_count(2)
    page.get_by_role("button", name="log axis").click()
    expect(lengths).not_to_have_attribute("d", plain or "")
    # A lag of 0 has no place on it.
    expect(page.locator("[data-chart='Lag, versions'] circle")).to_have_count(1)
    box = chart.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=*")
    assert "/batches/" not in page.url, "to drag is not to click"
    page.get_by_role("button", name="the whole run").click()
    page.wait_for_url(lambda url: "from=" not in url)


def test_arrow_keys_read_a_curve_and_enter_opens_its_batch(server: ShownRuns, new_page: NewPage) -> None:
    page = open_curves(new_page(server), "/r/small")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the content")).to_be_focused()
    page.locator("[data-chart='Length, tokens a trajectory'] svg").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tip")).to_contain_text("batch2")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tip")).to_contain_text("batch1")
    page.keyboard.press("Enter")
    page.wait_for_url("**/batches/1")
    expect(page.locator("h1")).to_have_text("Batch 1")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/batches/2")


def test_two_runs_have_colours_of_their_own_and_say_what_differs(two: ShownRuns, new_page: NewPage) -> None:
    page = open_curves(new_page(two), "/r/small?with=other&m=num_tokens")
    chart = page.locator("[data-chart='num_tokens']")
    colours = [path.evaluate("each => getComputedStyle(each).stroke") for path in chart.locator("path").all()]
    assert len(set(colours)) == len(colours) == 2
    rows = [row.split("\t") for row in page.locator("#settings tbody tr").all_inner_texts()]
    assert [row for row in rows if row[0] != "model.path"] == [
        ["batch.max_lag", "1", "7"], ["objective.eps_high", "0.0004", "0.125"],
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "address", ["/r/small?m=lag/max", "/r/small/completions", f"/r/small/batches/{BATCH}", "/r/small/t/8", "/r/small/groups"]
)
def test_every_text_stands_out_from_its_ground(address: str, scheme: str, server: ShownRuns, new_page: NewPage) -> None:
    page = open_curves(new_page(server, scheme=scheme), address)
    if address.endswith("completions"):
        page.wait_for_selector("tr[data-id]")
    if "/t/" in address:
        page.locator("button[data-way=none]").click()
    page.evaluate("Promise.all(document.getAnimations().map((each) => each.finished))")
    assert page.evaluate(FAINT, LEAST_CONTRAST) == []
