"""A built site, read as a browser would: each link and picture leads to a file of it; nothing is loaded from elsewhere."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

LOADED: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""What a browser fetches without a click."""


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {str(given[name]) for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        elif given.get(LOADED.get(tag, "")) and given.get("rel") != "canonical":
            self.loaded.append(str(given[LOADED[tag]]))


def objections(site: Path) -> list[str]:
    """What leads nowhere, by page."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        place = path.relative_to(site).as_posix()
        wrong += [f"{place} loads {url}" for url in page.loaded if urlsplit(url).netloc]
        # The page of an error is served at any address, so that its links begin at the site's root.
        base = site if place == "404.html" else path.parent
        for url in [*page.links, *page.loaded]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            file = (site / parts.path.lstrip("/") if parts.path.startswith("/") else base / unquote(parts.path)).resolve()
            file = path if not parts.path else file / "index.html" if file.is_dir() else file
            if not file.is_file():
                wrong.append(f"{place}: {url} is not there")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
                wrong.append(f"{place}: {url} has no such anchor")
    return wrong
