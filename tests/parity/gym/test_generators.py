"""All generators of reasoning-gym through the real process and the real reward function, beside the package itself."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gspo.tasks.environments import Task
from gspo.tasks.ladders import Rung
from gspo_protocol.limits import MAX_TASK_BYTES
from gspo_protocol.messages.base import require_plain
from gspo_services.tasks.environments.gym.options import SYSTEM_PROMPT, GeneratorOptions, ReasoningGymOptions
from gspo_services.tasks.environments.gym.tasks import GymHeldOut, GymSource, GymTraining
from gspo_services.tasks.gym import Generator, GymRefused, Library

pytestmark = [pytest.mark.parity, pytest.mark.timeout(1800)]
pytest.importorskip("reasoning_gym")

NUM_GENERATORS = 106
GARBAGE = "no idea (((" 


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    made = Library()
    yield made
    made.close()


def source_of(library: Library, **options: Any) -> GymSource:
    return GymSource(ReasoningGymOptions(**options), library)


def levels_of(library: Library, name: str) -> list[int | None]:
    """The defaults, and the levels: the lowest, the middle, the highest."""
    number = library.num_levels(Generator(name=name))
    return [None, *sorted({0, number // 2, number - 1} if number else set())]


def names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def test_every_generator_is_there(library: Library) -> None:
    assert library.names() == names()
    assert len(library.names()) == NUM_GENERATORS


@pytest.mark.parametrize("name", names())
def test_a_generator_makes_tasks_that_its_verifier_scores(library: Library, name: str) -> None:
    from gspo_services.tasks.gym.scoring import score

    for level in levels_of(library, name):
        for number in (3, 2**31 - 1):
            begin = time.monotonic()
            found = library.draw(Generator(name=name), level, number)
            seconds = time.monotonic() - begin
            task: dict[str, Any] = {"generator": name, "level": level, "parameters": "{}", **found}
            require_plain("task", task, MAX_TASK_BYTES)
            assert found["question"].strip()
            own = score(own_answer(task), task, 20.0)
            garbage = score(GARBAGE, task, 20.0)
            nothing = score(None, task, 20.0)
            print(name, level, f"{seconds:.3f}", len(found["question"]), len(found["entry"]), own, garbage, nothing)
            assert own["score"] == pytest.approx(1.0), task
            assert garbage["score"] < 1
            assert nothing["score"] < 1


def own_answer(task: Mapping[str, Any]) -> str:
    return str(task["answer"])
