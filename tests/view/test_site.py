"""The site of `make docs`: its search in real Chromium, pages beside what a code host shows of them, and planted faults."""

import http.server
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from markdown_it import MarkdownIt
from playwright.sync_api import Page, expect

from docs.site.build import CONTENTS, ROOT, pages_of

pytestmark = pytest.mark.view

PYTHON: Final = os.environ.get("GSPO_DOCS_PYTHON", str(ROOT / ".venv-docs" / "bin" / "python"))
BLOCKS: Final = {"table", "tr", "td", "li", "ol", "ul", "pre", "img", "h1", "h2", "h3"}
_FOOTNOTE: Final = re.compile(r"^\[\^[\w-]+\]:.*\n(?: +.*\n)*", re.MULTILINE)
_FAULTS: Final = {
    "README.md": "[a](docs/nothing.md)",
    "docs/gspo.md": "[a](design.md#no-such-heading)",
    "docs/scale.md": "![a](evidence/images/nothing.png)",
    "docs/unlisted.md": "# Nobody lists it",
    "gspo/loss.py": "\nNOTHING = 1\n'''See [it][gspo.loss.no_such_name].'''\n",
}


class Site(NamedTuple):
    folder: Path
    address: str


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += tag in BLOCKS


def built(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, "-m", "docs.site.build", str(folder / "site"), str(folder / "work")]
    environment = os.environ | {"NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("docs")
    done = built(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder / "site"))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Site(folder / "site", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_the_search_finds_a_setting_on_its_page(site: Site, new_page: Callable[..., Page]) -> None:
    page = new_page(site)
    page.goto("/")
    expect(page.locator("h1")).to_have_text(re.compile("gspo"))
    page.get_by_role("button", name="Search").first.click()
    page.get_by_role("combobox", name="Search").fill("PGSERVICEFILE")
    page.get_by_role("option", name="Set it up").click()
    page.wait_for_url("**/guide/brokers/**")
    expect(page.locator("h1")).to_have_text(re.compile("A standby broker"))


def test_a_name_of_the_library_leads_to_its_signature_also_on_a_narrow_screen(
    site: Site, new_page: Callable[..., Page]
) -> None:
    page = new_page(site, width=390)
    page.goto("/api/gspo/")
    page.get_by_role("link", name="padded_loss").click()
    page.wait_for_url("**/api/gspo.padded/#gspo.padded.padded_loss")
    expect(page.locator("[id='gspo.padded.padded_loss'] + .doc-signature")).to_contain_text("num_sequences: int")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_every_module_without_an_underscore_has_its_page(site: Site) -> None:
    """Those behind the door of a package, which lists names in ``__all__``, are on its page."""
    files = {".".join(path.with_suffix("").relative_to(ROOT).parts): path for path in (ROOT / "gspo").rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in files.items()}
    doors = [name for name, path in names.items() if path.name == "__init__.py" and "__all__" in path.read_text()]
    behind = tuple(f"{door}." for door in doors if door != "gspo")
    wanted = {name for name in names if "._" not in name and not name.startswith(behind)}
    assert wanted == {path.parent.name for path in (site.folder / "api").glob("*/index.html")}
    assert 'id="gspo.tasks.judge.Judge.ask"' in (site.folder / "api" / "gspo.tasks.judge" / "index.html").read_text()


def test_pages_have_the_blocks_that_a_code_host_shows(site: Site) -> None:
    """Python-Markdown and CommonMark disagree about lists, tables and code that no blank line surrounds."""
    different = {}
    for source, page in pages_of((ROOT / CONTENTS).read_text(encoding="utf-8")).items():
        wanted = Tags(
            MarkdownIt().enable("table").render(_FOOTNOTE.sub("", (ROOT / source).read_text(encoding="utf-8")))
        ).seen
        path = site.folder / page.removesuffix(".md").removesuffix("index") / "index.html"
        article = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        found = Tags(re.sub(r'<div class="footnote">.*?</div>', "", article, flags=re.DOTALL)).seen
        if wanted != found:
            different[source] = {"code host": wanted - found, "site": found - wanted}
    assert different == {}


def test_what_leads_nowhere_is_named_and_nothing_is_put_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("docs", "gspo", "protocol", "services", "names"):
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / name, root)
    for name, fault in _FAULTS.items():
        with (root / name).open("a", encoding="utf-8") as file:
            file.write(f"\n{fault}\n")
    done = built(root, tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    for each in (
        "README.md: docs/nothing.md is not there", "docs/scale.md: evidence/images/nothing.png is not there",
        "docs/unlisted.md is in no list of docs/README.md", "anchor does not exist", "gspo.loss.no_such_name",
    ):  # fmt: skip
        assert each in said
    assert not (tmp_path / "site").exists()
