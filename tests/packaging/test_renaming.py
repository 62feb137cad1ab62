"""The names of modules in the wheel: what is replaced, what stays, and what stops the build."""

import tomllib
from pathlib import Path

import pytest

from deploy.wheel.backend import BuildError, leftovers, project_of_copy, renamed, write_copy

CHILDREN = {"services": frozenset({"broker", "cli", "environments"}), "protocol": frozenset({"codec", "errors", "limits"})}

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "backend"

[project]
name = "gspo"
dependencies = [
"numpy",
]
authors = [
{ name = "services.broker" }
]
matrix = [
["a"],
]

[project.optional-dependencies]
services = ["pyzmq"]

[project.scripts]
gspo = "services.cli:main"

[project.entry-points."sglang.srt.platforms"]
torch_cpu = "services.broker:activate"

[tool.setuptools.package-data]
services = ["py.typed"]

[tool.mypy]
files = ["services"]
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from services.broker.store import Store", "from gspo_services.broker.store import Store"),
        ("import protocol.codec", "import gspo_protocol.codec"),
        ("import services.broker as broker, protocol.errors", "import gspo_services.broker as broker, gspo_protocol.errors"),
        ("from protocol import limits", "from gspo_protocol import limits"),
        ("    from services import broker  # late", "    from gspo_services import broker  # late"),
        ("x = 1; import services as s", "x = 1; import gspo_services as s"),
        ('module = "services.broker"', 'module = "gspo_services.broker"'),
        ('found = "services.environments.math:verify"', 'found = "gspo_services.environments.math:verify"'),
        ('run(f"services.{name}")', 'run(f"gspo_services.{name}")'),
        ("run('services.' + name)", "run('gspo_services.' + name)"),
        ('code = "from services import broker"', 'code = "from gspo_services import broker"'),
        (
            '"""`python -m services.broker`; ``protocol.codec``."""',
            '"""`python -m gspo_services.broker`; ``gspo_protocol.codec``."""',
        ),
        (
            "# as services.broker does it, and protocol.codec's",
            "# as gspo_services.broker does it, and gspo_protocol.codec's",
        ),
        ("protocol.codec.encode(protocol.limits.MAX)", "gspo_protocol.codec.encode(gspo_protocol.limits.MAX)"),
        ("@services.broker.traced", "@gspo_services.broker.traced"),
    ],
)
def test_a_name_of_one_of_our_modules_is_replaced(before: str, after: str) -> None:
    assert renamed(before, CHILDREN) == after
    assert renamed(after, CHILDREN) == after


@pytest.mark.parametrize(
    "text",
    [
        "self.protocol.codec.encode()",
        "world().services.broker.stop()",
        "my_services.broker",
        "services.brokers",
        "services.broker_of(x)",
        "services.unknown.broker",
        "from services_of_ours.broker import x",
        "from ours.services.broker import x",
        "from gspo.staleness import services",
        "from gspo.moe import protocol as p",
        "import servicesx",
        "services = protocol = None",
        "# The protocol. Errors are data; services, protocol.",
        'path = "services/broker/store.py"',
        'url = "http://protocol.errors/"',
        'extra = "gspo[services]"',
    ],
)
def test_any_other_text_stays(text: str) -> None:
    assert renamed(text, CHILDREN) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import os, services", "1: imports services: "),
        ("x = 1\nfrom  services  import broker", "2: imports services: "),
        ("from services \\\n    import broker", "1: imports services: "),
        ("from services.gone import x", "1: imports services.gone: "),
        ('module = "services" ".broker"', "1: the text 'services.broker' names a module: "),
        (r'module = "\x73ervices.broker"', "1: the text 'services.broker' names a module: "),
        ("def send(protocol):\n    raise protocol.errors", "2: a variable called protocol "),
        ("import protocol\nprint(protocol.VERSION)", "2: protocol is used as a package: "),
    ],
)
def test_what_cannot_be_renamed_safely_stops_the_build_with_its_line(text: str, problem: str) -> None:
    (found,) = leftovers(renamed(text, CHILDREN), CHILDREN)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "text",
    [
        "import protocol.codec\nprotocol.codec.encode()",
        "import services.broker as services\nservices.run()",
        "def send(protocol):\n    protocol.send(self.protocol.errors)",
        "for services in fleet:\n    print(services.names)",
        "protocol: Protocol = make()\nprotocol.close()",
        "match x:\n    case Peer() as protocol:\n        protocol.close()",
        '"services are three"',
        'print(f"{protocol_version}: services. Or protocol.")',
    ],
)
def test_what_was_renamed_rightly_leaves_nothing_behind(text: str) -> None:
    assert list(leftovers(renamed(text, CHILDREN), CHILDREN)) == []


def test_the_project_of_the_copy_differs_in_its_targets_and_tools_alone() -> None:
    text = project_of_copy(PYPROJECT, CHILDREN)
    before, after = tomllib.loads(PYPROJECT)["project"], tomllib.loads(text)["project"]
    assert {key for key in before if before[key] != after[key]} == {"scripts", "entry-points"}
    assert 'gspo = "gspo_services.cli:main"\n' in text
    assert 'torch_cpu = "gspo_services.broker:activate"\n' in text
    assert "\ngspo_services = ['py.typed']\n" in text
    assert 'build-backend = "setuptools.build_meta"' in text
    assert "mypy" not in text


def project(folder: Path, **modules: str) -> Path:
    """A source tree with ``services.cli`` and ``services.broker``; ``modules`` changes their text."""
    for name in ("gspo/__init__.py", "protocol/__init__.py", "protocol/codec.py", "services/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    for name, text in ({"cli": "from services import broker\n", "broker": ""} | modules).items():
        (folder / "services" / f"{name}.py").write_text(text)
    (folder / "services" / "py.typed").touch()
    (folder / "services" / "notes.txt").touch()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "README.md").touch()
    (folder / "LICENSE").touch()
    return folder


def test_a_copy_holds_modules_and_package_data_under_the_new_names(tmp_path: Path) -> None:
    source = project(tmp_path / "source")
    (source / "services" / "removed").mkdir()
    (source / "services" / "removed" / "old.cpython-311.pyc").touch()
    target = tmp_path / "target"
    target.mkdir()
    write_copy(source, target)
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()) == [
        "LICENSE",
        "README.md",
        "gspo/__init__.py",
        "gspo_protocol/__init__.py",
        "gspo_protocol/codec.py",
        "gspo_services/__init__.py",
        "gspo_services/broker.py",
        "gspo_services/cli.py",
        "gspo_services/py.typed",
        "pyproject.toml",
    ]
    assert (target / "gspo_services" / "cli.py").read_text() == "from gspo_services import broker\n"


def test_every_place_that_cannot_be_renamed_is_reported_at_once(tmp_path: Path) -> None:
    source = project(tmp_path / "source", cli="import os, services\n", broker='x = 1\ny = "protocol" ".codec"\n')
    with pytest.raises(BuildError) as refused:
        write_copy(source, tmp_path / "target")
    first, second = str(refused.value).splitlines()[1:]
    assert first.startswith("services/broker.py:2: the text 'protocol.codec'")
    assert second.startswith("services/cli.py:1: imports services")


def test_a_command_whose_module_is_not_there_stops_the_build(tmp_path: Path) -> None:
    source = project(tmp_path / "source")
    (source / "services" / "cli.py").rename(source / "services" / "command.py")
    with pytest.raises(BuildError, match=r"gspo = 'services\.cli:main' names a module that is not there"):
        write_copy(source, tmp_path / "target")
