"""Compilers: a program is compiled once, and run for each of its tests."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, Sandbox
from tests.sandbox.conftest import LIMITS

pytestmark = pytest.mark.sandbox

COMPILING = replace(LIMITS, wall_s=60, cpu_s=60, memory_bytes=1 << 30, file_bytes=128 << 20, scratch_bytes=256 << 20)
SUM = b"#include <iostream>\nint main() { long a, b; std::cin >> a >> b; std::cout << a + b << '\\n'; }\n"
needs_a_compiler = pytest.mark.skipif(shutil.which("g++", path="/usr/local/bin:/usr/bin:/bin") is None, reason="no g++")


@needs_a_compiler
async def test_a_program_is_compiled_once_and_run_many_times(sandbox: Sandbox) -> None:
    await sandbox.put({"sum.cpp": SUM})
    made = await sandbox.prepare(["g++", "-O2", "-o", "/sandbox/sum", "/sandbox/sum.cpp"], COMPILING)
    assert made.succeeded, made
    for number in range(20):
        outcome = await sandbox.run(["./sum"], LIMITS, f"{number} 1".encode())
        assert (outcome.stdout, outcome.exit_code) == (f"{number + 1}\n".encode(), 0)


@needs_a_compiler
async def test_what_cannot_be_compiled_says_why_and_ends_well(sandbox: Sandbox) -> None:
    await sandbox.put({"sum.cpp": b"int main() { return nothing; }"})
    made = await sandbox.prepare(["g++", "-o", "/sandbox/sum", "/sandbox/sum.cpp"], COMPILING)
    assert made.exit_code == 1
    assert b"nothing" in made.stderr
    assert (await sandbox.run(["./sum"], LIMITS)).exit_code == 127


@needs_a_compiler
async def test_what_compilers_include_is_what_programs_may_read(sandbox: Sandbox) -> None:
    """A program's own text may name any file: it reads no other one by its compiler."""
    await sandbox.put({"spy.cpp": b'#include "/etc/passwd"\n#include "/proc/self/environ"\nint main() {}\n'})
    made = await sandbox.prepare(["g++", "-o", "/sandbox/spy", "/sandbox/spy.cpp"], COMPILING)
    assert made.exit_code == 1
    assert b"/etc/passwd: No such file" in made.stderr
    assert b"root:" not in made.stderr


async def test_a_missing_compiler_is_named(sandbox: Sandbox) -> None:
    made = await sandbox.prepare(["no-such-compiler", "x"], LIMITS)
    assert made.exit_code == 127
    assert b"no-such-compiler" in made.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with an interpreter, outside of what a sandbox has anyway."""
    found = Path("/var/lib/gspo-sandbox-test")
    try:
        found.mkdir(parents=True)
    except PermissionError:
        pytest.skip("only root may create a folder outside of /tmp here")
    (found / "say").write_text("#!/bin/sh\necho said $1\n")
    (found / "say").chmod(0o755)
    yield found
    shutil.rmtree(found)


async def test_an_interpreter_elsewhere_is_found_by_its_folder(folder: Path) -> None:
    """Folders of ``read_only`` are there at their own places, and cannot be written."""
    async with (
        LocalSandboxes(LocalOptions(max_sandboxes=1, warm=0, read_only=[folder])).opened() as sandboxes,
        sandboxes.acquire() as sandbox,
    ):
        assert (await sandbox.run([f"{folder}/say", "hello"], LIMITS)).stdout == b"said hello\n"
        assert (await sandbox.run(["/bin/sh", "-c", f"echo x > {folder}/say || echo kept"], LIMITS)).stdout == b"kept\n"
