"""The Dockerfiles fit the repository and the code; nothing is built here."""

import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from urllib.parse import unquote

import pytest
from packaging.requirements import Requirement

from gspo_services.cli.main import PROCESSES
from gspo_services.shared.settings.sections import Settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
IMAGES = ("broker", "cpu", "learner", "rollout", "sandbox")
RENDEZVOUS = 29500


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined."""
    text = (DOCKER / f"{image}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def final_stage(image: str) -> list[tuple[str, str]]:
    found = instructions(image)
    return found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :]


def pins(name: str) -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "requirements" / name).read_text().splitlines()]
    entries = [
        Requirement(line.rstrip("\\")) for line in lines if line and not line.startswith(("#", "    --hash", "--hash"))
    ]
    assert all(re.fullmatch(r"==[\w.+!]+", str(entry.specifier)) for entry in entries), f"{name} does not pin everything"
    return {re.sub(r"[-_.]+", "-", entry.name).lower(): str(entry.specifier) for entry in entries}


def test_there_is_a_test_for_every_image() -> None:
    assert sorted(path.name.removesuffix(".Dockerfile") for path in DOCKER.iterdir()) == sorted(IMAGES)


@pytest.mark.parametrize("image", IMAGES)
def test_copied_files_exist_and_are_not_ignored(image: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    sources = [
        source
        for word, arguments in instructions(image)
        if word == "COPY" and "--from" not in arguments
        for source in arguments.split()[:-1]
    ]
    assert {"protocol", "gspo", "services", "setup.py", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert {f"!{part}" for part in (source, *Path(source).parents)} & set(ignored), source


@pytest.mark.parametrize("image", IMAGES)
def test_bases_and_packages_are_pinned(image: str) -> None:
    everything = instructions(image)
    bases = [arguments for word, arguments in everything if word == "ARG" and arguments.startswith("BASE=")]
    assert len(bases) == 1
    assert re.fullmatch(r"BASE=docker\.io/\S+:v?\d+\.\d+\.\d+\S*", bases[0])
    assert {arguments.split()[0] for word, arguments in everything if word == "FROM"} == {"${BASE}"}
    copied = " ".join(arguments for word, arguments in everything if word == "COPY")
    for _, arguments in everything:
        for command in re.findall(r"pip install ([^&]*)", arguments):
            files = re.findall(r"-r /src/(\S+)", command)
            assert all(file in copied and pins(Path(file).name) for file in files)
            free = [part for part in command.split() if not part.startswith("-") and part not in ("/src", "/opt/gspo")]
            rest = [part for part in free if not part.endswith(".txt")]
            assert all(part == "${TORCH}" or "==" in part for part in rest), command
            assert files or part_of_torch(command) or "--no-deps" in command
            assert not files or "--require-hashes" in command


def part_of_torch(command: str) -> bool:
    """Whether a command installs only PyTorch, which pins its own requirements exactly."""
    return command.strip() == "${TORCH}"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_the_user_of_the_pods(image: str) -> None:
    last = final_stage(image)
    assert [arguments for word, arguments in last if word == "USER"] == ["10001:10001"]
    users = [i for i, (word, _) in enumerate(last) if word == "USER"]
    assert not any(word in ("RUN", "COPY", "ADD") for word, _ in last[users[0] :])
    assert any(word == "RUN" and "--uid 10001" in arguments and "--gid 10001" in arguments for word, arguments in last)


@pytest.mark.parametrize("image", IMAGES)
def test_the_entry_point_is_gspo(image: str) -> None:
    last = dict(final_stage(image))
    assert last["ENTRYPOINT"] == '["gspo"]'
    assert 'gspo = "gspo_services.cli.main:main"' in (ROOT / "pyproject.toml").read_text()
    command = re.findall(r'"([^"]+)"', last["CMD"])
    assert command[0] in {*PROCESSES, "--help"}


def test_exposed_ports_are_the_default_ports() -> None:
    settings = Settings()
    port = {
        key: int(endpoint.rpartition(":")[2])
        for key, endpoint in {
            "work": settings.broker.work_endpoint,
            "batch": settings.broker.batch_endpoint,
            "weights": settings.learner.weights_endpoint,
        }.items()
    }
    broker = {port["work"], port["batch"], settings.broker.metrics_port}
    learner = {port["weights"], settings.learner.metrics_port}
    rollout = {settings.rollout.metrics_port}
    sandbox = {settings.sandbox.port, settings.sandbox.metrics_port}
    wanted = {"broker": broker, "learner": learner | {RENDEZVOUS}, "rollout": rollout, "cpu": learner | rollout}
    wanted["sandbox"] = sandbox
    assert {image: {int(p) for p in dict(final_stage(image))["EXPOSE"].split()} for image in IMAGES} == wanted


@pytest.mark.parametrize("name", ["broker.txt", "learner.txt", "rollout-gpu.txt", "sandbox.txt"])
def test_an_image_has_the_tested_versions(name: str) -> None:
    tested = pins("cpu.txt")
    assert {key: tested.get(key) for key in pins(name)} == pins(name)


def test_torch_and_deepspeed_are_those_of_the_tested_environment() -> None:
    assert pins("torch-cpu.txt")["torch"] == pins("torch-cuda.txt")["torch"] + "+cpu"
    for image, torch in (("cpu", "torch-cpu.txt"), ("learner", "torch-cuda.txt")):
        text = "\n".join(arguments for _, arguments in instructions(image))
        assert f"-r /src/requirements/{torch}" in text
        assert "-r /src/requirements/deepspeed.txt" in text


def test_sglang_has_the_tested_version() -> None:
    found = re.search(r"lmsysorg/sglang:v([\d.]+)", (DOCKER / "rollout.Dockerfile").read_text())
    assert found is not None
    assert f"=={found[1]}" == pins("cpu.txt")["sglang"]


IMPORTS = """
import sys
from importlib.abc import MetaPathFinder

hidden = set(sys.argv[1:])

class NotInTheImage(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is not in the image")

sys.meta_path.insert(0, NotInTheImage())
import gspo_services.broker.__main__, gspo_services.cli.main, gspo_services.cli.audit, gspo_services.cli.keys
import pyarrow.parquet
from gspo_services.tasks.environments.registry import ENVIRONMENTS, find_environment
for name in ENVIRONMENTS:
    find_environment(name)
"""


HIDING, _, _ = IMPORTS.partition("import gspo_services")
SANDBOX_IMPORTS = f"{HIDING}import gspo_services.tasks.sandbox.server.__main__, gspo_services.cli.main"


def hidden_modules(installed: set[str]) -> list[str]:
    """Top-level modules of this environment that an image with the packages ``installed`` lacks."""
    owners = {
        module: {re.sub(r"[-_.]+", "-", name).lower() for name in names}
        for module, names in packages_distributions().items()
    }
    return [module for module, names in owners.items() if not names & (installed | {"gspo"})]


@pytest.mark.parametrize(("left_out", "status"), [(None, 0), ("pyzmq", 1)])
def test_the_brokers_image_has_everything_that_it_imports(left_out: str | None, status: int) -> None:
    hidden = hidden_modules(set(pins("broker.txt")) - {left_out})
    assert {"torch", "matplotlib"} <= set(hidden)
    done = subprocess.run([sys.executable, "-c", IMPORTS, *hidden], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == status, done.stderr[-800:]


@pytest.mark.parametrize(("left_out", "status"), [(None, 0), ("aiohttp", 1)])
def test_the_image_of_sandboxes_has_everything_that_it_imports(left_out: str | None, status: int) -> None:
    hidden = hidden_modules(set(pins("sandbox.txt")) - {left_out})
    assert {"torch", "zmq", "pyarrow"} <= set(hidden)
    done = subprocess.run(
        [sys.executable, "-c", SANDBOX_IMPORTS, *hidden], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == status, done.stderr[-800:]


def test_the_image_of_sandboxes_has_bubblewrap_and_a_compiler() -> None:
    installed = [arguments for word, arguments in final_stage("sandbox") if word == "RUN" and "apt-get install" in arguments]
    assert len(installed) == 1
    assert {"bubblewrap", "g++"} <= set(installed[0].split())


@pytest.mark.deploy
@pytest.mark.parametrize("image", IMAGES)
def test_a_bill_of_materials_lists_every_package_that_the_dockerfile_installs(image: str) -> None:
    from deploy.sbom.generate import sbom_of

    lists = {
        name for _, arguments in instructions(image) for name in re.findall(r"-r /src/requirements/([\w.-]+)", arguments)
    }
    wanted = {f"{name}@{version[2:]}" for each in lists for name, version in pins(each).items()}
    listed = {part.get("purl", "") for part in json.loads(sbom_of(image, "0.1.0"))["components"]}
    assert wanted
    assert {unquote(purl.removeprefix("pkg:pypi/")) for purl in listed if purl.startswith("pkg:pypi/")} >= wanted
