"""One browser, and a page that may ask nobody but the server, without an error on its console."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.view.big_ledger import write_big_ledger
from tests.support.view.shown_runs import ShownRuns, shown, write_shown_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

# `make test-view` has a playwright of its own; other targets need not.
collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]

CHROMIUM: Final = os.environ.get("GSPO_CHROMIUM", "/usr/bin/chromium")
NUM_TRAJECTORIES: Final = int(os.environ.get("GSPO_VIEW_TRAJECTORIES", "1000192"))
ARGUMENTS: Final = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shown") / "small"
    write_shown_run(directory)
    return directory


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shown") / "big"
    write_big_ledger(directory, NUM_TRAJECTORIES)
    return directory


@pytest.fixture(scope="session")
def server(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownRuns]:
    with shown([run], tmp_path_factory.mktemp("cache")) as server:
        yield server


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages of a width; at the end no page may have complained, or asked another host."""
    troubles: list[str] = []
    contexts = []

    def new_page(server: ShownRuns, width: int = 1280, scheme: str = "light", *, quiet: bool = True) -> Page:
        """``quiet``: nothing may be on the console, such as a request that was refused."""
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, base_url=server.address)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()

        def judge(request: Request) -> None:
            if not request.url.startswith(server.address + "/"):
                troubles.append(f"asked {request.url}")

        # Watched, not routed: a route would add the time of this process to each request.
        page.on("request", judge)
        page.on("pageerror", lambda error: troubles.append(f"error {error}"))
        page.on(
            "console",
            lambda message: troubles.append(message.text) if quiet and message.type in ("error", "warning") else None,
        )
        return page

    yield new_page
    for context in contexts:
        context.close()
    assert troubles == []
