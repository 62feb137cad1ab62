"""The documentation stays in order: links resolve, the index names every page, and folders stay small."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
MAX_FILES = 30
MAX_WORDS = {DOCS: 52_000, DOCS / "evidence": 10_000}
"""Of all pages below a folder, without the two that are generated. README.md has a bound of its own."""
# What newcomers ask, the page that README.md sends them to, and a word of the answer there.
QUESTIONS = {
    "Where is a stale group dropped?": ("docs/code.md", "a stale group is dropped"),
    "Where is the clip range computed?": ("docs/code.md", "the clip range"),
    "Where does a rollout verify weights?": ("docs/code.md", "a rollout verifies weights"),
    "Where is max_lag enforced?": ("docs/code.md", "`max_lag`"),
    "Where do I add a tracker?": ("docs/code.md", "| a tracker |"),
    "Where do I add a field of a message?": ("docs/code.md", "PROTOCOL_VERSION"),
    "Where do I add a setting?": ("docs/code.md", "make docs-settings"),
    "How do I write an environment?": ("docs/guide/tasks-and-agents.md", "class Echo(Environment)"),
    "How do I write a reward?": ("docs/guide/rewards.md", "def grade(completion, task)"),
    "How is a recorded call answered again?": ("docs/guide/tasks-and-agents.md", "gets the recorded answer"),
    "How does a run survive the loss of the broker's machine?": ("docs/guide/brokers.md", "standby serves within seconds"),
    "How do I resume, and from what?": ("docs/guide/operations.md", "same `gspo run` command resumes"),
}
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links(page: Path) -> Iterator[str]:
    """Targets of links and images that point into the repository."""
    text = _CODE.sub("", _FENCED.sub("", page.read_text(encoding="utf-8")))
    return (target for target in _LINK.findall(text) if not re.match(r"\w+:", target))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings: lower case, no punctuation, a dash for each space."""
    headings = _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_and_image_of_a_page_resolves(page: Path) -> None:
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == [], f"{name_of(page)} has broken links"


def test_there_are_links_with_and_without_anchors_and_images_to_check() -> None:
    found = [target for page in PAGES for target in links(page)]
    assert len([target for target in found if "#" in target]) > 30
    assert len([target for target in found if target.endswith(".png")]) > 15
    assert len([target for target in found if target.endswith(".md")]) > 50


def test_the_index_lists_every_page() -> None:
    index = DOCS / "README.md"
    listed = {(DOCS / target.partition("#")[0]).resolve() for target in links(index)}
    missing = sorted(name_of(page) for page in DOCS.rglob("*.md") if page not in listed | {index})
    assert missing == [], "add a line for it to docs/README.md"


@pytest.mark.parametrize(("page", "answer"), QUESTIONS.values(), ids=QUESTIONS)
def test_a_newcomers_question_is_answered_by_a_page_that_the_readme_links_to(page: str, answer: str) -> None:
    assert page in {target.partition("#")[0] for target in links(ROOT / "README.md")}
    assert answer in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_every_image_is_shown_by_a_page() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for target in links(page) if target.endswith(".png")}
    assert sorted(name_of(image) for image in DOCS.rglob("*.png") if image not in shown) == []


def test_no_folder_of_the_documentation_has_more_than_thirty_files() -> None:
    folders = [DOCS, *(path for path in DOCS.rglob("*") if path.is_dir())]
    crowded = {
        name_of(folder): number for folder in folders if (number := sum(p.is_file() for p in folder.iterdir())) > MAX_FILES
    }
    assert crowded == {}


@pytest.mark.parametrize("folder", MAX_WORDS, ids=name_of)
def test_the_documentation_stays_short(folder: Path) -> None:
    words = {name_of(page): len(page.read_text(encoding="utf-8").split()) for page in folder.rglob("*.md")}
    words.pop("docs/settings.md", None)
    words.pop("docs/guide/families.md", None)
    longest = sorted(words, key=words.__getitem__)[-3:]
    assert sum(words.values()) <= MAX_WORDS[folder], f"shorten what says a thing twice; the longest pages are {longest}"
