"""An init that lies, hangs or dies is an error of the sandbox, and never a program's result."""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, SandboxError, SandboxLimits, SandboxUnavailable
from gspo_services.tasks.sandbox import local as local_module

WITH_INIT = Callable[[str], AbstractAsyncContextManager[LocalSandboxes]]
FRAMES = """\
import json, os, struct, sys
def say(header, *blobs):
    text = json.dumps(header).encode()
    os.write(1, struct.pack(">I", len(text)) + text + b"".join(blobs))
say({"ready": True, "sizes": []})
(length,) = struct.unpack(">I", os.read(0, 4))
header = json.loads(os.read(0, length))
RESULT = {"exit_code": 0, "signal": None, "limit": None, "wall_s": 0.1, "cpu_s": 0.1, "sizes": [1, 0]}
"""


@pytest.fixture
def with_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WITH_INIT:
    """A sandbox whose bwrap is a script of the test's."""

    @asynccontextmanager
    async def opened(text: str) -> AsyncIterator[LocalSandboxes]:
        program = tmp_path / "bwrap"
        (tmp_path / "init.py").write_text(FRAMES + text)
        # A first line `#!` takes no path with spaces.
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/init.py"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        options = LocalOptions(max_sandboxes=1, warm=0, python=Path("/usr/bin/python3"))
        async with LocalSandboxes(options).opened() as sandboxes:
            yield sandboxes

    return opened


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("os.write(1, b'\\0\\0\\0\\1{')", "cannot be read"),
        ("os.write(1, b'\\xff\\xff\\xff\\xff')", "header of"),
        ("say({'sizes': [1 << 40]})", "parts of"),
        ("say({'sizes': [-1]})", "parts of"),
        ("say({'sizes': 'x'})", "parts of"),
        ("say({})", "cannot be read"),
        ("say({**RESULT, 'exit_code': 'zero'}, b'x')", "not one"),
        ("say({**RESULT, 'limit': 'patience'}, b'x')", "not one"),
        ("say({**RESULT, 'sizes': []})", "no outputs"),
        ("say({'failed': 'no more memory', 'sizes': []})", "no more memory"),
        ("", "has ended"),
    ],
)
async def test_an_answer_that_is_none_is_an_error(with_init: WITH_INIT, text: str, says: str) -> None:
    async with with_init(text) as sandboxes, sandboxes.acquire() as sandbox:
        with pytest.raises(SandboxError, match=says):
            await sandbox.run(["true"], SandboxLimits())


async def test_a_true_answer_is_taken(with_init: WITH_INIT) -> None:
    async with with_init("say(RESULT, b'x')") as sandboxes, sandboxes.acquire() as sandbox:
        outcome = await sandbox.run(["true"], SandboxLimits())
        assert (outcome.exit_code, outcome.stdout, outcome.succeeded) == (0, b"x", True)


async def test_an_init_that_hangs_is_given_up_after_the_limit(with_init: WITH_INIT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "GRACE_S", 0.1)
    async with with_init("os.read(0, 1); os.read(0, 1)") as sandboxes, sandboxes.acquire() as sandbox:
        with pytest.raises(SandboxError, match=r"said nothing for 0\.2 s"):
            await sandbox.run(["true"], SandboxLimits(wall_s=0.1))


async def test_a_machine_without_namespaces_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace: Operation not permitted' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = LocalOptions(max_sandboxes=1, warm=0, python=Path("/usr/bin/python3"))
    with pytest.raises(SandboxUnavailable, match=r"Operation not permitted\n.*Install bubblewrap"):
        async with LocalSandboxes(options).opened():
            raise AssertionError("it is open")
