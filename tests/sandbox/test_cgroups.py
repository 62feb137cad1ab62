"""Cgroups of this machine: who gets some, how, and what becomes of them. Version 2 with any controller that is free."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes
from gspo_services.tasks.sandbox.cgroups import LEAF, PREFIX, memory_cgroups
from tests.sandbox.conftest import LIMITS, python

pytestmark = pytest.mark.sandbox

SAYS = """
import os, sys
from gspo_services.tasks.sandbox.cgroups import memory_cgroups
with memory_cgroups(controller=sys.argv[1]) as cgroups:
    print(cgroups.described, flush=True)
    if len(sys.argv) > 2:
        os.kill(os.getpid(), 9)
    print(open("/proc/self/cgroup").read())
"""
ORDINARY = 12345
PROGRAM = "import os\nkept = bytearray(os.urandom(1)) * (100 << 20)\nprint(len(kept))"


def mounted() -> tuple[Path, str] | None:
    """Where version 2 is, and a controller that it has."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2" and (names := (Path(place) / "cgroup.controllers").read_text().split()):
            return Path(place), names[-1]
    return None


@pytest.fixture
def second() -> Iterator[tuple[Path, str]]:
    """A new cgroup of version 2, and a controller for it."""
    found = mounted()
    if found is None or os.geteuid() != 0:
        pytest.skip("it needs root and cgroups of version 2")
    root, controller = found
    before = (root / "cgroup.subtree_control").read_text().split()
    (root / "cgroup.subtree_control").write_text(f"+{controller}")
    folder = root / f"gspo-test-{os.getpid()}"
    folder.mkdir()
    yield folder, controller
    for place in (*folder.glob("*/"), folder):
        place.rmdir()
    if controller not in before:
        (root / "cgroup.subtree_control").write_text(f"-{controller}")


def started_in(folder: Path, *arguments: str, ordinary: bool = False) -> list[str]:
    """What a process says that is in a cgroup from its start."""
    user = [f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"] if ordinary else []
    # Root's own interpreter is nobody else's.
    interpreter = "/usr/bin/python3.11" if ordinary else sys.executable
    command = [
        "sh",
        "-c",
        'echo $$ > "$0/cgroup.procs" && exec "$@"',
        str(folder),
        "setpriv",
        *user,
        interpreter,
        "-c",
        SAYS,
    ]
    path = os.pathsep.join(part for part in (str(Path("names").absolute()), *sys.path) if part)
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_a_cgroup_with_processes_is_divided_only_where_it_is_delegated(second: tuple[Path, str]) -> None:
    folder, controller = second
    assert started_in(folder, controller)[0] == f"no cgroup ({folder} has processes and is not delegated)"
    assert not list(folder.glob("*/"))
    os.setxattr(folder, "trusted.delegate", b"1")
    said, *own = started_in(folder, controller)
    assert said == f"cgroup v2 {folder}"
    assert any(line.endswith(f"/{folder.name}/gspo-processes") for line in own)


def test_an_ordinary_user_has_cgroups_where_somebody_has_delegated_one(second: tuple[Path, str]) -> None:
    if not os.access("/usr/bin/python3.11", os.X_OK):
        pytest.skip("no interpreter for an ordinary user")
    folder, controller = second
    assert started_in(folder, controller, ordinary=True)[0].startswith(f"no cgroup ({folder} cannot have parts: ")
    for path in (folder, folder / "cgroup.procs", folder / "cgroup.subtree_control"):
        os.chown(path, ORDINARY, ORDINARY)
    assert started_in(folder, controller, ordinary=True)[0] == f"cgroup v2 {folder}"


def test_what_a_killed_process_has_left_is_removed_by_the_next(second: tuple[Path, str]) -> None:
    folder, controller = second
    os.setxattr(folder, "trusted.delegate", b"1")
    assert started_in(folder, controller, "dies") == [f"cgroup v2 {folder}"]
    assert len(list(folder.glob(PREFIX + "*"))) == 1
    # It begins where the first one has put everybody.
    assert started_in(folder / LEAF, controller)[0] == f"cgroup v2 {folder}"
    assert not list(folder.glob(PREFIX + "*"))


async def test_the_kernel_ends_a_run_over_its_memory_and_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_cgroups() as cgroups:
        if cgroups.described.startswith("no cgroup"):
            pytest.skip(cgroups.described)
    # Nobody looks meanwhile: what init counts would say the same, later.
    monkeypatch.setattr("gspo_services.tasks.sandbox.walls.START", UNSEEING)
    async with LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0)).opened() as sandboxes, sandboxes.acquire() as sandbox:
        limits = {"memory_bytes": 64 << 20, "scratch_bytes": 1 << 20}
        for _ in range(3):
            outcome = await python(sandbox, PROGRAM, type(LIMITS)(**{**vars(LIMITS), **limits}))
            assert (outcome.limit, outcome.stdout) == ("memory", b"")
            assert (await python(sandbox, PROGRAM)).stdout == b"104857600\n"


UNSEEING = (
    "import sys; sys.path.insert(0, '/init'); from gspo_sandbox_init import main, watch; del sys.path[0]; "
    "watch.LOOK_S = 1000; main.main(sys.argv[1:])"
)
