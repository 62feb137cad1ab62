"""``python -m docs.site.build OUT [WORK]``: the site of this documentation, and a reference of ``gspo``, into OUT.

The pages are those of a code host; what differs on a site is changed in a copy of them. Navigation is in the order of
docs/README.md, and the reference has every module of ``gspo``. Whatever leads nowhere is an error: a link, an anchor, a
picture, a page that docs/README.md leaves out, a file that is loaded from another host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from docs.site.checked import objections

ROOT: Final = Path(__file__).parents[2]
HOME: Final = "README.md"
CONTENTS: Final = "docs/README.md"
Nav: TypeAlias = "list[dict[str, Any]]"
_CODE: Final = re.compile(r"^ *(```+).*?^ *\1 *$|(`+)(?!`).*?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)")


def build(out: Path, work: Path) -> list[str]:
    """Build the site in ``work`` and put it into ``out``. Returns what is wrong; then nothing is put there."""
    # Here, not above: griffe, which it needs, is in the environment of this target alone.
    from docs.site.reference import reference

    contents = (ROOT / CONTENTS).read_text(encoding="utf-8")
    pages = pages_of(contents)
    listed, nav = navigation(contents, pages)
    wrong = [f"{source} is in no list of {CONTENTS}" for source in sorted(pages.keys() - listed - {HOME, CONTENTS})]
    shutil.rmtree(work, ignore_errors=True)
    repository = repository_url()
    for source, page in pages.items():
        text, found = rewritten(source, pages, repository)
        wrong += found
        _write(work / "pages" / page, text)
    for file in _files("docs"):
        if not file.endswith((".md", ".py", ".pyc", ".toml")):
            place = work / "pages" / file.removeprefix("docs/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, place)
    of_code, entries = reference(ROOT / "names")
    for page, text in of_code.items():
        _write(work / "pages" / page, text)
    settings = tomllib.loads((Path(__file__).with_name("zensical.toml")).read_text(encoding="utf-8"))["project"]
    settings["nav"] = [{"Home": "index.md"}, {"All pages": "contents.md"}, *nav, {"Reference": entries}]
    settings["plugins"]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "names")]
    # Zensical reads YAML, too, of which JSON is a part.
    _write(work / "mkdocs.yml", json.dumps(settings))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(work / "mkdocs.yml")]
    done = subprocess.run(command, cwd=work, check=False)
    wrong += ["Zensical found what is written above"] if done.returncode else objections(work / "site")
    if not wrong:
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(work / "site", out)
    return wrong


def pages_of(contents: str) -> dict[str, str]:
    """Where each page is on the site: README.md, all in docs/, and what docs/README.md lists besides."""
    linked = [_resolved(CONTENTS, target) for *_, target in links(contents)]
    found = {HOME: "index.md", CONTENTS: "contents.md"}
    for source in [*_files("docs"), *linked]:
        if source.endswith(".md") and source not in found:
            found[source] = source.removeprefix("docs/") if source.startswith("docs/") else source.lower()
    return found


def links(text: str) -> Iterator[tuple[re.Match[str], str, str]]:
    """Links and images outside code: the match, "!" for an image, and the target."""
    masked = _CODE.sub(lambda code: "x" * len(code[0]), text)
    return ((match, match[1], match[3]) for match in _LINK.finditer(masked))


def rewritten(source: str, pages: Mapping[str, str], repository: str) -> tuple[str, list[str]]:
    """A page as the site has it, and its links to files that are not there.

    A link to a file that is no page leads to the repository; where that has no address, its text alone is left.
    """
    text = (ROOT / source).read_text(encoding="utf-8")
    parts, wrong, end = [], [], 0
    for match, image, target in links(text):
        if re.match(r"\w+:|#", target):
            continue
        path, mark, anchor = target.partition("#")
        file = _resolved(source, path)
        here = os.path.dirname(pages[source])
        label = text[match.start(2) : match.end(2)]
        if not (ROOT / file).exists():
            wrong.append(f"{source}: {target} is not there")
        elif file in pages or image or file.startswith("docs/"):
            place = os.path.relpath(pages.get(file, file.removeprefix("docs/")), here or ".")
            label = f"{image}[{label}]({place}{mark}{anchor})"
        elif repository:
            label = f"[{label}]({repository}/{'tree' if (ROOT / file).is_dir() else 'blob'}/HEAD/{file}{mark}{anchor})"
        parts += [text[end : match.start()], label]
        end = match.end()
    return "".join([*parts, text[end:]]), wrong


def navigation(contents: str, pages: Mapping[str, str]) -> tuple[set[str], Nav]:
    """The pages that docs/README.md lists, and the navigation that it describes: its lists below their titles."""
    listed: set[str] = set()
    nav: Nav = []
    for line in contents.splitlines():
        title = re.match(r"\*\*(.+?)\*\*|([A-Z][\w ]+):$", line)
        if title:
            nav.append({title[1] or title[2]: []})
        for *_, target in links(line):
            source = _resolved(CONTENTS, target.partition("#")[0])
            if nav and source in pages and source not in listed:
                listed.add(source)
                next(iter(nav[-1].values())).append({_title(source): pages[source]})
    return listed, nav


def repository_url() -> str:
    """Where the repository can be read, without a key that may stand in the address; empty: nobody said."""
    address = (
        os.environ.get("REPOSITORY_URL")
        or subprocess.run(
            ["git", "config", "--get", "remote.origin.url"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    found = re.fullmatch(r"(?:(?:https?|ssh)://(?:[^/@]*@)?|[^/@]+@)([\w.-]+)(?::\d+)?[:/](.+?)(?:\.git)?/?", address)
    return f"https://{found[1]}/{found[2]}" if found else ""


def _resolved(source: str, target: str) -> str:
    """A target as a path from the repository's root."""
    path = target.partition("#")[0]
    return os.path.normpath(os.path.join(os.path.dirname(source), path)) if path else source


def _files(folder: str) -> Iterator[str]:
    return (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).rglob("*")) if path.is_file())


def _title(source: str) -> str:
    return re.search(r"^# +(.+)$", (ROOT / source).read_text(encoding="utf-8"), re.MULTILINE)[1].replace("`", "")  # type: ignore[index]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    found = build(Path(sys.argv[1]).resolve(), Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "build" / "docs").resolve())
    sys.stderr.writelines(f"{each}\n" for each in found)
    sys.exit(bool(found))
