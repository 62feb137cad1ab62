"""One import name for each package: in a checkout, beside a user's packages of our folder names, and for static tools."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {"gspo": "gspo", "gspo_protocol": "protocol", "gspo_services": "services"}
USER_PROJECT = ROOT / "tests" / "packaging" / "user_project"


@pytest.mark.parametrize("folder", ["services", "protocol"])
def test_the_name_of_a_folder_is_no_import_name_and_the_error_says_which_is(folder: str) -> None:
    with pytest.raises(ImportError, match=f"^import gspo_{folder}: "):
        importlib.import_module(folder)


def test_a_former_way_to_start_a_process_says_the_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.broker"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "import gspo_services" in done.stderr


@pytest.mark.parametrize(("name", "folder"), NAMES.items())
def test_the_links_for_static_tools_lead_to_the_folders(name: str, folder: str) -> None:
    link = ROOT / "names" / name
    assert os.readlink(link) == f"../{folder}"
    assert {each.name for each in (ROOT / "names").iterdir()} == set(NAMES)


ENVIRONMENT = "from gspo_services.tasks.environments import find_environment as find; found = find('services.tasks:Words')"
REWARD = "from gspo_services.shared.runtime.user_modules import import_named as find; found = find('services.tasks').grade"
AGENT = "from gspo_services.tasks.worker.imports import find_function as find; found = find('services.agent:solve')"


@pytest.mark.parametrize(("what", "code"), [("environment", ENVIRONMENT), ("reward", REWARD), ("agent", AGENT)])
def test_a_project_with_packages_of_our_folder_names_is_found_from_the_checkout(what: str, code: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    code = f"{code}; import services, protocol, tests, utils; print(found.__module__, utils.__file__, sep=chr(10))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=USER_PROJECT, env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, what + done.stderr
    module, utils = done.stdout.splitlines()
    assert module in ("services.tasks", "services.agent")
    assert Path(utils) == USER_PROJECT / "utils.py"
