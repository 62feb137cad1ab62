"""Whether programs can run where the configuration says."""

import shutil
from contextlib import nullcontext

import pytest

from gspo_services.prepare.check.findings import Finding
from gspo_services.tasks.sandbox import NO_CGROUP, local
from gspo_services.tasks.sandbox.cgroups import MemoryCgroups
from tests.support.checking.projects import Project


def of_the_sandbox(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.check == "sandbox"]


def test_a_run_that_names_no_sandbox_is_not_asked_for_one(project: Project) -> None:
    assert of_the_sandbox(project.findings(code=False)) == []


def test_a_server_that_is_not_there_is_named_with_the_way_out(project: Project, unused_tcp_port: int) -> None:
    project.keys["sandbox.urls"] = [f"http://127.0.0.1:{unused_tcp_port}"]
    (finding,) = of_the_sandbox(project.findings(code=False))
    assert (finding.status, finding.basis) == ("fail", "tried")
    assert f"127.0.0.1:{unused_tcp_port} cannot be reached" in finding.text
    assert "start `gspo sandbox` there" in finding.way_out
    (note,) = of_the_sandbox(project.findings(code=False, elsewhere=True))
    assert note.status == "note"


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    project.keys["sandbox.max_sandboxes"] = 1
    (finding,) = of_the_sandbox(project.findings(code=False))
    assert finding.text == "bwrap is not found in PATH"
    assert "apt-get install bubblewrap" in finding.way_out


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap here")
@pytest.mark.parametrize("has_cgroup", [True, False])
def test_what_counts_the_memory_of_programs_is_said(
    project: Project, monkeypatch: pytest.MonkeyPatch, has_cgroup: bool
) -> None:
    found = MemoryCgroups(None, "", "cgroup v2 /here" if has_cgroup else f"{NO_CGROUP} (/here cannot have parts)")
    monkeypatch.setattr(local, "memory_cgroups", lambda: nullcontext(found))
    project.keys["sandbox.max_sandboxes"] = 1
    _, finding = of_the_sandbox(project.findings(code=False))
    assert (finding.status, finding.text) == ("ok" if has_cgroup else "note", f"memory of programs: {found.described}")
    assert ("Delegate=yes" in finding.way_out) is not has_cgroup


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("python", "/no/such/python", "sandbox.python is /no/such/python: no program is there"),
        ("read_only", ["/no/such/folder"], "sandbox.read_only holds /no/such/folder: no such folder"),
    ],
)
def test_what_the_section_names_must_be_there(project: Project, key: str, value: object, says: str) -> None:
    project.keys[f"sandbox.{key}"] = value
    (finding,) = of_the_sandbox(project.findings(code=False))
    assert says in finding.text
