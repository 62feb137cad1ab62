"""Targets for directories that others made: a backup's manifest and tree."""

import json
import shutil
from functools import cache
from pathlib import Path
from random import Random

from gspo_services.runs.backup.backup import back_up
from gspo_services.runs.backup.manifest import MANIFEST
from gspo_services.runs.backup.restore import restore
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.shared.runtime.foreign import name_problem
from tests.fuzz.mutate import FRAME_MARK, mutate_bytes, mutate_json
from tests.fuzz.scratch import scratch
from tests.fuzz.target import Target, require
from tests.support.processes.small_run import write_small_run
from tests.support.runs.backups import nothing
from tests.support.runs.hostile_backups import SECRET, contents, make_hostile, opened_in


@cache
def _good() -> Path:
    place = scratch() / "trees"
    write_small_run(place / "run")
    (place / "victim").mkdir()
    (place / "victim" / "secret").write_bytes(SECRET)
    return back_up(place / "run", place / "backups", nothing)[0]


def backup(data: bytes) -> None:
    """A manifest, and the seed of changes to the tree beside it: nothing outside changes, no link is followed."""
    manifest, seed = (*data.split(FRAME_MARK), b"")[:2]
    place = _good().parents[1]
    made, target, victim = place / "hostile", place / "target", place / "victim"
    make_hostile(_good(), made, victim, Random(seed), manifest=manifest, least=0)
    try:
        before = {**contents(victim), **contents(made)}
        with opened_in(victim) as was_opened:
            try:
                restore(made, target, None, nothing)
                links = [path for path in target.rglob("*") if path.is_symlink()]
                require(not links, f"it restored links: {links[:1]}")
            except (ServiceError, ConfigurationError):
                require(not target.exists(), "something of what was refused is there")
            require(not was_opened(), "a link was followed")
        require({**contents(victim), **contents(made)} == before, "something outside the target changed")
        require({path.name for path in place.iterdir()} <= PLACE, "something was written beside the target")
    finally:
        for left in (made, target, *victim.glob("aside-*")):
            shutil.rmtree(left, ignore_errors=True)


PLACE = {"run", "backups", "victim", "hostile", "target"}


@cache
def backup_seeds() -> list[bytes]:
    whole = (_good() / MANIFEST).read_bytes()
    plain = json.loads(whole)
    file = plain["files"]["settings.json"]
    outside = json.dumps(plain | {"files": plain["files"] | {"../victim/evil": file}}).encode()
    return [whole, outside, *(whole + FRAME_MARK + bytes([number]) for number in range(20))]


def mutate_backup(data: bytes, rng: Random) -> bytes:
    """Change the manifest, or take other changes of the tree."""
    manifest, *seeds = data.split(FRAME_MARK)
    if rng.random() < 0.5:
        return FRAME_MARK.join((manifest, rng.randbytes(2)))
    return FRAME_MARK.join((mutate_json(manifest, rng), *seeds))


def name(data: bytes) -> None:
    """A file's name: refused, or below the directory whatever it is."""
    text = data.decode("utf-8", "surrogateescape")
    if name_problem(text):
        return
    root = Path("/root/of/a/tree")
    found = Path(*root.parts, *text.split("/"))
    require(found.relative_to(root).as_posix() == text and ".." not in found.parts, f"{text!r} leaves the directory")


TARGETS = (
    Target(name="backup", run=backup, seeds=backup_seeds, mutate=mutate_backup, cases=20_000, max_bytes=16_384),
    Target(
        name="foreign_name",
        run=name,
        seeds=lambda: [b"a/b", b"../a", b"/a", b"a/./b", b"a//b", b"checkpoints/version-1-batch-2/x"],
        mutate=mutate_bytes,
        cases=300_000,
        max_bytes=512,
    ),
)
