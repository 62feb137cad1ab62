"""How tests are spread over workers: modules stay whole, those that share a server stay together, and the longest begin."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest

pytest_plugins = ["tests.support.workers.order"]

@pytest.fixture(scope="session")
def sglang_server():
    return 1
"""
SHARES = "def test_one(sglang_server): ...\ndef test_two(sglang_server): ...\n"
ALONE = "import pytest\n@pytest.mark.parametrize('number', range(5))\ndef test_it(number): ...\n"


def spread(directory: Path, modules: dict[str, str]) -> dict[str, list[str]]:
    """The modules that each of two workers ran, one for each test, in their order."""
    (directory / "conftest.py").write_text(CONFTEST)
    for name, text in modules.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    options = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-v", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(directory), str(directory)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = defaultdict(list)
    for worker, module in re.findall(r"^\[(gw\d)\].* PASSED (\S+?)::", done.stdout, re.MULTILINE):
        ran[worker].append(module)
    return dict(ran)


def test_modules_that_share_a_server_run_in_one_worker_and_no_module_is_split(tmp_path: Path) -> None:
    modules = {
        "test_a.py": ALONE,
        "test_b.py": SHARES,
        "test_c.py": ALONE,
        "test_d.py": SHARES,
        "tests/integration/test_e.py": ALONE,
    }
    ran = spread(tmp_path, modules)
    assert sorted(ran) == ["gw0", "gw1"]
    workers = {name: [worker for worker in ran if name in ran[worker]] for name in modules}
    assert {name: len(found) for name, found in workers.items()} == dict.fromkeys(modules, 1)
    assert workers["test_b.py"] == workers["test_d.py"]
    # First come the server's modules, and the folder of processes.
    assert {each[0] for each in ran.values()} == {"test_b.py", "tests/integration/test_e.py"}
