"""docs/code.md: every place that the map of the code names exists, and no room of services is missing from it."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.pages import shown

ROOT = Path(__file__).parents[3]
MAP = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"`((?:protocol|gspo|services|tests|deploy|docs)/[^`\s]*)`", MAP)))


def names_in(path: Path) -> set[str]:
    """Every class, function, method and module-level name, dotted."""

    def walk(nodes: list[ast.stmt], prefix: str) -> set[str]:
        found = set()
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found |= {prefix + node.name} | walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            elif isinstance(node, ast.Assign):
                found |= {prefix + target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
        return found

    return walk(ast.parse(path.read_text(encoding="utf-8")).body, "")


def objection(place: str) -> str:
    """What is wrong with a place; empty when it is there."""
    file, _, name = place.partition("::")
    path = ROOT / file
    if not (path.is_dir() if file.endswith("/") else path.is_file()):
        return f"{file} is not there"
    return f"{file} has no {name}" if name and name not in names_in(path) else ""


def test_every_place_that_the_map_names_is_there() -> None:
    assert len(PLACES) > 40
    assert [found for place in PLACES if (found := objection(place))] == []


def test_a_place_that_is_not_there_is_named() -> None:
    assert objection("services/nowhere.py") == "services/nowhere.py is not there"
    assert objection("services/nowhere/") == "services/nowhere/ is not there"
    assert objection("gspo/loss.py::no_such_loss") == "gspo/loss.py has no no_such_loss"
    assert objection("gspo/loss.py::gspo_loss") == ""


def test_every_room_of_services_is_on_the_map() -> None:
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "services").rglob("__init__.py")}
    wings = {"services/", *(f"services/{wing}/" for wing in wings_of_the_contract())}
    shown = {place for place in PLACES if place.startswith("services/") and place.endswith("/")}
    assert shown - wings == rooms - wings
    assert wings_of_the_contract() == set(re.findall(r"^### services/(\w+)$", MAP, re.MULTILINE))


def layers_of(container: str) -> list[str]:
    """The floors of a package in its import contract, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (found,) = (each for each in contracts if each.get("containers") == [container] and each.get("exhaustive"))
    return list(found["layers"])


def wings_of_the_contract() -> set[str]:
    return {wing for floor in layers_of("gspo_services") for wing in floor.split(" | ")}


def plan_of_the_contracts() -> list[str]:
    """The picture of the house: its floors from the top down, as the contracts have them."""
    line = "-" * 30
    doors, *floors = layers_of("gspo")
    return [
        " | ".join(f"gspo.{door}" for door in doors.split(" | ")), f"{line} doors of gspo",
        *layers_of("gspo_services"), f"{line} services",
        *("gspo" if ":" in floor else f"gspo.{floor}" for floor in floors), f"{line} gspo",
        "protocol",
    ]  # fmt: skip


def test_the_picture_of_the_plan_is_that_of_the_contracts() -> None:
    assert shown("docs/code.md", "gspo.runs |").splitlines() == plan_of_the_contracts()


JOURNEYS = {
    "A token, from the engine to the loss": "gspo/loss.py::gspo_loss",
    "A version of the weights": "services/rollout/weights/verify.py::Verifier.verify",
    "A reward": "gspo/loss.py::gspo_loss",
    "A setting": "services/shared/settings/told.py::told_settings",
    "A group whose learner dies": "services/broker/ledger/training.py::Training.on_resume",
}
"""Each with where it ends."""


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_goes_from_place_to_place_to_its_end(name: str) -> None:
    """Each step names a place, which the first test here looks for."""
    (steps,) = re.findall(rf"^\*\*{name}\*\*\n\n((?:\d+\. .+\n)+)", MAP, re.MULTILINE)
    places = [re.findall(r"`([^`]+/[^`]+)`", step) for step in steps.splitlines()]
    assert len(places) >= 6
    assert all(places), "a step without a place"
    assert places[-1] == [JOURNEYS[name]]
    assert [place for step in places for place in step if objection(place)] == []
