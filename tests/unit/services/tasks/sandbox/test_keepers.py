"""A keeper that lies, hangs or dies is an error of the sandbox, and never a program's result."""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from gspo_services.tasks.sandbox import LocalOptions, LocalSandbox, SandboxError, SandboxLimits, SandboxUnavailable
from gspo_services.tasks.sandbox import local as local_module

WITH_KEEPER = Callable[[str], AbstractAsyncContextManager[LocalSandbox]]
FRAMES = """#!{python}
import json, os, struct, sys
def say(header, *blobs):
    text = json.dumps(header).encode()
    os.write(1, struct.pack(">I", len(text)) + text + b"".join(blobs))
say({{"ready": True, "sizes": []}})
(length,) = struct.unpack(">I", os.read(0, 4))
header = json.loads(os.read(0, length))
RESULT = {{"exit_code": 0, "signal": None, "limit": None, "wall_s": 0.1, "cpu_s": 0.1, "sizes": [1, 0]}}
"""


@pytest.fixture
def with_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WITH_KEEPER:
    """A sandbox whose bwrap is a script of the test's."""

    @asynccontextmanager
    async def opened(text: str) -> AsyncIterator[LocalSandbox]:
        program = tmp_path / "bwrap"
        program.write_text(FRAMES.format(python=sys.executable) + text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        options = LocalOptions(places=1, spare=0, python=Path("/usr/bin/python3"))
        async with LocalSandbox(options).opened() as sandbox:
            yield sandbox

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
async def test_an_answer_that_is_none_is_an_error(with_keeper: WITH_KEEPER, text: str, says: str) -> None:
    async with with_keeper(text) as sandbox, sandbox.box() as box:
        with pytest.raises(SandboxError, match=says):
            await box.run(["true"], SandboxLimits())


async def test_a_true_answer_is_taken(with_keeper: WITH_KEEPER) -> None:
    async with with_keeper("say(RESULT, b'x')") as sandbox, sandbox.box() as box:
        outcome = await box.run(["true"], SandboxLimits())
        assert (outcome.exit_code, outcome.stdout, outcome.succeeded) == (0, b"x", True)


async def test_a_keeper_that_hangs_is_given_up_after_the_limit(
    with_keeper: WITH_KEEPER, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "GRACE_S", 0.1)
    async with with_keeper("os.read(0, 1); os.read(0, 1)") as sandbox, sandbox.box() as box:
        with pytest.raises(SandboxError, match=r"said nothing for 0\.2 s"):
            await box.run(["true"], SandboxLimits(wall_s=0.1))


async def test_a_machine_without_namespaces_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace: Operation not permitted' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = LocalOptions(places=1, spare=0, python=Path("/usr/bin/python3"))
    with pytest.raises(SandboxUnavailable, match=r"Operation not permitted\n.*Install bubblewrap"):
        async with LocalSandbox(options).opened():
            raise AssertionError("it is open")
