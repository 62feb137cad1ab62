"""The pages of the site are those of the repository: what its build changes in them, and what it does not let pass."""

from pathlib import Path

import pytest

from docs.site import build
from docs.site.checked import objections

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/gspo.md": "gspo.md",
    "docs/guide/a.md": "guide/a.md",
}
HOST = "https://git.example.com/us/gspo"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    for name in (*PAGES, "examples/a.toml", "docs/guide/a.png", "services/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "on_the_site"),
    [
        ("[a](../gspo.md#b)", "[a](../gspo.md#b)"),
        ("[a](../../README.md) [b](../../CONTRIBUTING.md#c)", "[a](../index.md) [b](../contributing.md#c)"),
        ("![a](a.png)", "![a](a.png)"),
        ("[`a`](../../examples/a.toml)", f"[`a`]({HOST}/blob/HEAD/examples/a.toml)"),
        ("[a](../../services/)", f"[a]({HOST}/tree/HEAD/services)"),
        ("[a](https://b.example/c) [d](#e)", "[a](https://b.example/c) [d](#e)"),
        ("`[a](b.md)` ``[`a`](b.md)``", "`[a](b.md)` ``[`a`](b.md)``"),
        ("```text\n[a](b.md)\n```\n", "```text\n[a](b.md)\n```\n"),
    ],
)
def test_links_lead_to_pages_or_into_the_repository(written: Path, text: str, on_the_site: str) -> None:
    (written / "docs/guide/a.md").write_text(text)
    assert build.rewritten("docs/guide/a.md", PAGES, HOST) == (on_the_site, [])


def test_without_an_address_of_the_repository_a_link_into_it_is_its_text(written: Path) -> None:
    (written / "README.md").write_text("see [`a`](examples/a.toml) and [g](docs/gspo.md)")
    assert build.rewritten("README.md", PAGES, "") == ("see `a` and [g](gspo.md)", [])


def test_what_is_not_there_is_named(written: Path) -> None:
    (written / "README.md").write_text("[a](docs/b.md) ![c](docs/d.png) [e](examples/f.toml)")
    _, wrong = build.rewritten("README.md", PAGES, HOST)
    assert wrong == [f"README.md: {each} is not there" for each in ("docs/b.md", "docs/d.png", "examples/f.toml")]


@pytest.mark.parametrize(
    "address",
    [
        "https://git.example.com/us/gspo", "https://git.example.com/us/gspo.git", "git@git.example.com:us/gspo.git",
        "ssh://git@git.example.com:22/us/gspo.git", "https://somebody:secret@git.example.com/us/gspo/",
    ],
)  # fmt: skip
def test_the_repositorys_address_is_shown_without_keys(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("REPOSITORY_URL", address)
    assert build.repository_url() == HOST


def test_a_repository_on_this_machine_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPOSITORY_URL", "/srv/git/gspo.git")
    assert build.repository_url() == ""


def test_the_navigation_is_what_the_index_lists(written: Path) -> None:
    for name in ("CONTRIBUTING.md", "docs/gspo.md", "docs/guide/a.md"):
        (written / name).write_text(f"# The `{Path(name).stem}`\n")
    contents = (
        "# All\n\nRead first:\n\n1. [x](guide/a.md#b)\n\n**More**: [z](gspo.md), [u](../CONTRIBUTING.md), [x](guide/a.md)\n"
    )
    listed, nav = build.navigation(contents, PAGES)
    assert listed == {"docs/guide/a.md", "docs/gspo.md", "CONTRIBUTING.md"}
    assert nav == [
        {"Read first": [{"The a": "guide/a.md"}]},
        {"More": [{"The gspo": "gspo.md"}, {"The CONTRIBUTING": "contributing.md"}]},
    ]


def test_a_built_page_that_leads_nowhere_or_elsewhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text('<h1 id="c">C</h1><a href="..">home</a><a href="#d">d</a>')
    (tmp_path / "index.html").write_text(
        '<a href="b/#c">fine</a><a href="https://example.com">fine</a><a href="b/#e">e</a><a href="f/">f</a>'
        '<img src="g.png">'
        '<script src="https://example.com/h.js"></script><link rel="stylesheet" href="//example.com/i.css">'
    )
    assert objections(tmp_path) == [
        "b/index.html: #d has no such anchor",
        "index.html loads https://example.com/h.js",
        "index.html loads //example.com/i.css",
        "index.html: b/#e has no such anchor",
        "index.html: f/ is not there",
        "index.html: g.png is not there",
    ]
