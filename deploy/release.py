"""What `make release` does itself: refuse what is not ready, build the distributions of a commit, tell what to tag.

    python -m deploy.release ready | build | tell

Needs nothing but Python's standard library, except for `build`, which runs in the environment of requirements/release.txt.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
HADOLINT: Final = ("DL3003", "DL3008", "DL3013", "DL3059", "DL3064")
"""Not followed: one RUN works in a folder; Debian's mirrors drop old versions; pip takes lists, or ${TORCH}, which is one;
a RUN is a layer of its own; TOKENIZERS_PARALLELISM is no secret."""


class ReleaseError(RuntimeError):
    """This commit cannot be released. The text says why, and what to do."""


def version_of(root: Path) -> str:
    return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def check_ready(root: Path) -> None:
    """Raises: ReleaseError when files are not committed, the changelog lacks the version, or a tag contradicts it."""
    version = version_of(root)
    if changed := _git(root, "status", "--porcelain").splitlines():
        raise ReleaseError(f"{len(changed)} files are not as committed, such as {changed[0][3:]}: commit or remove them")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no section `## {version} - YYYY-MM-DD`: say there what is new")
    unreleased = re.search(r"^## Unreleased\n(.*?)^## ", changelog, re.MULTILINE | re.DOTALL)
    if unreleased and unreleased[1].strip():
        raise ReleaseError(f"CHANGELOG.md has lines under Unreleased: move them to the section of {version}")
    here = [tag for tag in _git(root, "tag", "--points-at", "HEAD").split() if re.match(r"v\d", tag)]
    if here and f"v{version}" not in here:
        raise ReleaseError(f"this commit has the tag {here[0]}, and pyproject.toml says {version}: make them the same")
    if not here and _git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"v{version} is the tag of another commit: raise the version in pyproject.toml")


def build() -> None:
    """Put wheel and sdist of a fresh clone into dist/, after the checks that read files alone.

    Raises: subprocess.CalledProcessError when a check fails or the build does.
    """
    for old in [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="gspo-release-") as folder:
        clone = Path(folder) / "gspo"
        _run("git", "clone", "--quiet", ROOT, clone, folder=ROOT)
        (clone / ".venv").symlink_to(ROOT / ".venv")  # The hooks are in it. Git ignores it.
        _run(clone / ".venv/bin/pre-commit", "run", "--all-files", folder=clone, PRE_COMMIT_HOME=folder)
        ignored = [word for rule in HADOLINT for word in ("--ignore", rule)]
        _run(_tool("hadolint"), *ignored, *sorted(clone.glob("deploy/docker/*.Dockerfile")), folder=clone)
        _run(_tool("zizmor"), "--offline", "--quiet", clone / ".github", folder=clone)
        # Files in the wheel are as old as the commit: the same commit gives the same wheel.
        when = _git(clone, "log", "-1", "--format=%ct").strip()
        words = ("-m", "build", "--quiet", "--no-isolation", "--outdir", DIST, clone)
        _run(sys.executable, *words, folder=clone, SOURCE_DATE_EPOCH=when)
    _run(_tool("twine"), "check", "--strict", *_distributions(), folder=ROOT)


def tell() -> None:
    version = version_of(ROOT)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  dist/{path.name}" for path in _distributions()]
    tag = f"git tag --annotate v{version} --message 'gspo {version}' && git push origin v{version}"
    sys.stdout.write("\n".join([*lines, f"{version} is ready. It is released by its tag:", f"    {tag}"]) + "\n")


def _distributions() -> list[Path]:
    return [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]


def _tool(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True, timeout=60).stdout


def _run(*words: str | Path, folder: Path, **variables: str) -> None:
    subprocess.run([str(word) for word in words], cwd=folder, env={**os.environ, **variables}, check=True)


def main(step: str) -> int:
    try:
        {"ready": lambda: check_ready(ROOT), "build": build, "tell": tell}[step]()
    except ReleaseError as error:
        sys.stderr.write(f"not ready for a release: {error}\n")
        return 1
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"not ready for a release: {' '.join(map(str, error.cmd[:3]))} ... ended with {error.returncode}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
