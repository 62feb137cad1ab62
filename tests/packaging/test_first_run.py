"""docs/guide/first-run.md from the wheel alone: `gspo setup` in a new environment, then its commands in an empty folder.

Run by `make test-wheel`; needs a package index.
"""

import json
import random
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest

from tests.packaging.installation import ROOT, environment_of_a_user
from tests.support.processes.ports import free_ports

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(2400)]
PAGE = (ROOT / "docs" / "guide" / "first-run.md").read_text(encoding="utf-8").split("\n## ")[2]
COMMANDS = [line.partition("  #")[0].strip() for line in re.findall(r"^ *\$ ((?:cd \w+ && )?gspo .*)$", PAGE, re.MULTILINE)]


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The folder of the commands of a new environment that holds the wheel, and what its `gspo setup` installs."""
    for words in (
        [sys.executable, "-m", "venv", tmp_path / "env"],
        [tmp_path / "env/bin/pip", "install", "--quiet", wheel],
        [tmp_path / "env/bin/gspo", "setup"],
    ):
        done = subprocess.run(words, cwd=tmp_path, env=environment_of_a_user(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return tmp_path / "env" / "bin"


def variables(commands: Path) -> dict[str, str]:
    """Those of a shell in which the environment is active, and ports that nobody else uses."""
    work, batch, weights, *metrics = free_ports(6)
    return {
        **environment_of_a_user(),
        "PATH": f"{commands}:{environment_of_a_user()['PATH']}",
        "GSPO_BROKER__WORK_ENDPOINT": f"tcp://127.0.0.1:{work}",
        "GSPO_BROKER__BATCH_ENDPOINT": f"tcp://127.0.0.1:{batch}",
        "GSPO_LEARNER__WEIGHTS_ENDPOINT": f"tcp://127.0.0.1:{weights}",
        "GSPO_BROKER__METRICS_PORT": str(metrics[0]),
        "GSPO_LEARNER__METRICS_PORT": str(metrics[1]),
        "GSPO_ROLLOUT__METRICS_PORT": str(metrics[2]),
    }


def write_rows(folder: Path) -> None:
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(400)]
    rows = [{"question": f"{left}+{right}", "answer": str(left + right)} for left, right in pairs]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def replace_the_reward(project: Path) -> None:
    """As the page says: the function, and what its components count."""
    ((function, _),) = re.findall(r"^(( *)def grade.*\n(?:\2 +.*\n)+)", PAGE, re.MULTILINE)
    (weights,) = re.findall(r"`(reward_weights = .*?)`", PAGE)
    (project / "my_reward.py").write_text(textwrap.dedent(function))
    settings = (project / "run.toml").read_text()
    assert settings.count("reward_weights = ") == 1
    (project / "run.toml").write_text(re.sub(r"reward_weights = \{.*?\}", weights, settings))


def look_at(command: str, folder: Path, environment: dict[str, str]) -> str:
    """The page that `gspo view` serves until Ctrl-C."""
    words = [*shlex.split(command), "--port", "0"]
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while not (address := re.search(r"http://\S+", said)):
                line = process.stdout.readline()
                assert line, said
                said += line
            with urllib.request.urlopen(address[0], timeout=60) as response:
                return str(response.read().decode())
        finally:
            process.send_signal(signal.SIGINT)


def test_the_page_takes_a_user_from_an_empty_folder_to_a_model(installed: Path, tmp_path: Path) -> None:
    environment, folder = variables(installed), tmp_path / "empty"
    folder.mkdir()
    write_rows(folder)
    said: dict[str, str] = {}
    for command in COMMANDS:
        if command.startswith("cd "):
            into, _, command = command.partition(" && ")
            folder /= into.removeprefix("cd ")
        name = " ".join(command.split()[:2])
        if name == "gspo view":
            said[name] = look_at(command, folder, environment)
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        said[name] = done.stdout
        if name == "gspo init":
            replace_the_reward(folder / "sums")
    assert list(said) == ["gspo model", "gspo init", "gspo check", "gspo env", "gspo run", "gspo view", "gspo export"]
    assert "reward" in said["gspo env"]
    assert "<title>" in said["gspo view"]
    after, reward = re.findall(r"after (\d+) batches, held-out reward ([\d.]+)", said["gspo export"])[0]
    assert after == "60"
    # It begins with 0.01.
    assert float(reward) > 0.1
    assert {path.suffix for path in (folder / "model").iterdir()} >= {".json", ".safetensors"}
