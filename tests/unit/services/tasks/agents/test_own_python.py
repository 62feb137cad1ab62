"""Agents under a Python of their own, which has none of our packages."""

import ast
import asyncio
import sys
from pathlib import Path

import msgpack
import pytest

import gspo.tasks.agents
import gspo.tasks.computer
import gspo.tasks.step_order
import gspo_services.tasks.computers
import gspo_services.tasks.sandbox.init
import gspo_services.tasks.worker
from tests.support.agent_pools import ListJournal, agent_pool, agent_task

OF_TASKS = {"gspo.tasks.computer", "gspo.tasks.step_order"}
"""What the worker loads of ours beside its own files."""
WORKER_FILES = [
    *(Path(str(module.__file__)) for module in (gspo.tasks.agents, gspo.tasks.computer, gspo.tasks.step_order)),
    *sorted((Path(gspo_services.tasks.computers.__file__).parent / "inside").glob("*.py")),
    *sorted(Path(gspo_services.tasks.worker.__file__).parent.glob("*.py")),
    *sorted(Path(gspo_services.tasks.sandbox.init.__file__).parent.glob("*.py")),
]
INTEGRATIONS = Path(gspo.tasks.agents.__file__).with_name("integrations")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment without packages."""
    folder = tmp_path_factory.mktemp("bare") / "environment"

    async def make() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "venv", "--without-pip", str(folder))
        assert await process.wait() == 0

    asyncio.run(make())
    return str(folder / "bin" / "python")


async def test_an_agent_has_its_own_packages_and_not_ours(
    bare_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(msgpack.__file__).parents[1]))
    async with agent_pool(python=bare_python, output=tmp_path / "agents.log") as pool:
        result = await pool.solve(agent_task("without_our_packages"))
    assert (result.reward, result.detail) == (3.0, "")
    assert f"prefix {Path(bare_python).parents[1]}" in (tmp_path / "agents.log").read_text()


async def test_everything_works_there_as_here(bare_python: str, tmp_path: Path) -> None:
    journal = ListJournal()
    async with agent_pool(python=bare_python) as pool:
        steps = await pool.solve(agent_task("two_steps", notes=str(tmp_path / "notes")), journal)
        failed = await pool.solve(agent_task("fail"))
        late = await pool.solve(agent_task("wait_for_ever", deadline_s=0.2))
        hung = await pool.solve(agent_task("spin"))
    assert (steps.components["second"], len(journal.calls)) == (2.0, 2)
    assert (failed.failure, late.failure, hung.failure) == ("raised", "deadline", "hung")
    assert "in fail_deeper" in failed.detail
    assert "in spin" in hung.detail


async def test_a_module_that_is_missing_there_is_named_with_the_interpreter(bare_python: str) -> None:
    async with agent_pool("tests.support.agent_pools:agent_task", python=bare_python) as pool:
        result = await pool.solve(agent_task("answer"))
    assert result.failure == "unknown_function"
    assert "No module named 'psutil'" in result.detail
    assert bare_python in result.detail


async def test_an_adapter_is_found_there_and_says_which_package_it_needs(bare_python: str) -> None:
    async with agent_pool("gspo.tasks.integrations.verifiers:solve", python=bare_python) as pool:
        result = await pool.solve(agent_task("answer"))
    assert result.failure == "unknown_function"
    assert "No module named 'verifiers'" in result.detail
    assert bare_python in result.detail


def imports_of(path: Path) -> list[str]:
    """What a file imports by name, as Python 3.10 reads it."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return imported + [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]


@pytest.mark.parametrize("path", WORKER_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_workers_files_are_python_3_10_and_import_only_its_standard_library(path: Path) -> None:
    newer = {"tomllib", "asyncio.taskgroups", "asyncio.timeouts"}
    imported = [name for name in imports_of(path) if name not in OF_TASKS]
    assert [name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names or name in newer] == []


@pytest.mark.parametrize(
    ("name", "brings"),
    [
        ("__init__", set()),
        ("__main__", set()),
        ("verifiers", {"verifiers", "gspo"}),
        ("verifiers_chat", {"verifiers", "openai"}),
        ("verifiers_seats", {"verifiers", "gspo"}),
        ("openenv", {"openai", "gspo"}),
        ("openenv_session", {"openenv", "openai", "websockets"}),
    ],
)
def test_an_adapter_imports_only_what_its_own_package_brings(name: str, brings: set[str]) -> None:
    imported = imports_of(INTEGRATIONS / f"{name}.py")
    assert {each.partition(".")[0] for each in imported} - sys.stdlib_module_names == brings
    own = {
        "gspo.tasks.integrations",
        "gspo.tasks.agents",
        "gspo.tasks.integrations.openenv_session",
        "gspo.tasks.integrations.verifiers_seats",
    }
    assert {each for each in imported if each.startswith("gspo")} <= own


def test_every_adapter_is_looked_at() -> None:
    assert {path.stem for path in INTEGRATIONS.glob("*.py")} == {
        "__init__", "__main__", "verifiers", "verifiers_chat", "verifiers_seats", "openenv", "openenv_session",
    }  # fmt: skip
