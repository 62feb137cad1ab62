"""What reasoning-gym has: generators, their parameters and levels, and tasks drawn from them. It takes seconds to import."""

from __future__ import annotations

import dataclasses
import decimal
import difflib
import random
import signal
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, get_type_hints

import msgspec
import numpy as np

from gspo_services.tasks.gym.asking import Generator, GymRefused
from gspo_services.tasks.gym.evaluating import evaluates, guarding, is_guarded
from gspo_services.tasks.gym.package import CURRICULA, DATASETS, VERSION, RangeAttributeDefinition
from gspo_services.tasks.gym.plain import as_json, from_json

NO_GENERATORS: Final = frozenset({"composite"})
"""Data sets of the package that draw from others."""
OURS: Final = ("seed", "size")
"""Parameters that every generator has, and that a task's number decides."""
CHUNK: Final = 50
"""Tasks of a data set that draws all of its tasks when it is made."""
DRAW_CPU_S: Final = 2.0
"""Processor seconds for one task. Nearly all take milliseconds, and a few do not come to an end."""
SLOW_LEVELS: Final[Mapping[str, frozenset[int]]] = {
    "jugs": frozenset({2, 3}), "sokoban": frozenset({0}), "zebra_puzzles": frozenset({4, 5}),
}  # fmt: skip
"""Levels of which half of the tasks or more take longer (0.1.25). They are left out."""
MOST_KEPT: Final = 512


class GymDataset:
    """A data set of the package for one generator, at one level."""

    def __init__(self, generator: Generator, level: int | None, *, seed: int = 0, size: int = CHUNK) -> None:
        """Raises: GymRefused when the generator refuses its parameters."""
        config = configuration(generator, level)
        self._name = generator.name
        kind = DATASETS[generator.name][0]
        if evaluates(kind.score_answer) and not is_guarded(generator.name):
            raise GymRefused(
                f"the verifier of generator {generator.name!r} in reasoning-gym {VERSION} evaluates answers as Python in a "
                "way that is not known here, so an answer could run any code: leave this generator out"
            )
        before = dict(vars(kind))
        try:
            self._dataset = kind(config=dataclasses.replace(config, seed=seed, size=size))
        except Exception as error:
            raise GymRefused(f"{_named(generator, level)} refuses to be made: {_told(error)}") from error
        # One generator leaves its data in its class, where the next level replaces it.
        self._of_class = {name: value for name, value in vars(kind).items() if before.get(name) is not value}

    def entry(self, number: int) -> dict[str, Any]:
        """Task ``number``. Raises: IndexError where all tasks were drawn before; whatever the generator raises."""
        return dict(self._ready()[number])

    def score(self, answer: str | None, entry: Mapping[str, Any]) -> Any:
        """What its verifier says. Raises: whatever the verifier raises."""
        dataset = self._ready()
        with guarding(self._name, type(dataset).__module__):
            return dataset.score_answer(answer, entry)

    def _ready(self) -> Any:
        for name, value in self._of_class.items():
            setattr(type(self._dataset), name, value)
        return self._dataset


def generator_names() -> list[str]:
    """In their order."""
    return sorted(set(DATASETS) - NO_GENERATORS)


def levels(generator: Generator) -> list[int]:
    """See ``Library.levels``."""
    _config_class(generator)
    curriculum = CURRICULA.get(generator.name)
    attributes = [] if curriculum is None else list(curriculum().attributes.values())
    free = [each for each in attributes if not _fields(each) <= set(generator.parameters)]
    found = [
        level for level in range(max((len(each.levels) for each in free), default=0)) if _is_level(generator.name, level)
    ]
    for level in found or (None,):
        configuration(generator, level)
    if generator.parameters:
        # Some parameters are refused only when they are used.
        GymDataset(generator, found[0] if found else None, size=1)
    return found


def _is_level(name: str, level: int) -> bool:
    """Some curricula have levels that their own generator refuses, or cannot draw."""
    if level in SLOW_LEVELS.get(name, ()):
        return False
    try:
        configuration(Generator(name=name), level)
    except GymRefused:
        return False
    return True


def configuration(generator: Generator, level: int | None) -> Any:
    """The generator's configuration at ``level``; None: its defaults. The generator's own parameters hold at every level.

    Raises: GymRefused.
    """
    config_class = _config_class(generator)
    parameters = _converted(generator, config_class)
    try:
        if level is None:
            config = config_class(**parameters)
        else:
            curriculum = CURRICULA[generator.name]()
            curriculum.set_global_level(level)
            config = dataclasses.replace(curriculum.generate_configuration(defaults=parameters), **parameters)
        if hasattr(config, "validate"):
            config.validate()
    except Exception as error:
        raise GymRefused(f"{_named(generator, level)} refuses its parameters: {_told(error)}") from error
    return config


def draw(generator: Generator, level: int | None, number: int) -> dict[str, str]:
    """See ``Library.draw``. The kernel ends this process when it takes too long: some generators catch every error."""
    dataset = dataset_of(generator, level)
    # Some generators take from these and not from their own, or change the precision of all.
    random.seed(number)
    np.random.seed(number)
    signal.setitimer(signal.ITIMER_PROF, DRAW_CPU_S)
    try:
        with decimal.localcontext(decimal.Context()):
            try:
                entry = dataset.entry(number)
            except IndexError:
                chunk, place = divmod(number, CHUNK)
                entry = GymDataset(generator, level, seed=chunk).entry(place)
        question, answer = str(entry.pop("question")), entry["answer"]
        return {"question": question, "answer": "" if answer is None else str(answer), "entry": as_json(entry)}
    # The package's own code: whatever it raises concerns this task only.
    except Exception as error:
        raise GymRefused(f"{_named(generator, level)} made no task {number}: {_told(error)}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def entry_of(question: str, text: str) -> dict[str, Any]:
    """The generator's entry out of a task's fields "question" and "entry"."""
    return {"question": question, **from_json(text)}


def dataset_of(generator: Generator, level: int | None) -> GymDataset:
    """The data set, made once. Raises: GymRefused."""
    return _kept(generator.name, msgspec.json.encode(generator.parameters, order="sorted"), level)


@lru_cache(maxsize=MOST_KEPT)
def _kept(name: str, parameters: bytes, level: int | None) -> GymDataset:
    return GymDataset(Generator(name=name, parameters=msgspec.json.decode(parameters)), level)


def _config_class(generator: Generator) -> Any:
    known = generator_names()
    if generator.name in known:
        return DATASETS[generator.name][1]
    if generator.name in NO_GENERATORS:
        raise GymRefused(f"{generator.name!r} mixes other generators: name these in generators, each with its weight")
    close = difflib.get_close_matches(generator.name, known, n=4, cutoff=0.6)
    way_out = f"do you mean {' or '.join(close)}?" if close else f"its generators are {', '.join(known)}"
    raise GymRefused(f"reasoning-gym {VERSION} has no generator {generator.name!r}: {way_out}")


def _converted(generator: Generator, config_class: Any) -> dict[str, Any]:
    """The parameters in the types that the generator's configuration names."""
    allowed = [field.name for field in dataclasses.fields(config_class) if field.init and field.name not in OURS]
    hints = get_type_hints(config_class)
    found = {}
    for name, value in generator.parameters.items():
        if name in OURS:
            raise GymRefused(
                f"generator {generator.name!r}: {name} is no parameter here: tasks have no end, and the option seed chooses "
                "others"
            )
        if name not in allowed:
            raise GymRefused(
                f"generator {generator.name!r} has no parameter {name!r}: its parameters are {', '.join(allowed)}"
            )
        try:
            found[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            raise GymRefused(f"generator {generator.name!r}: {name} is {value!r}: {str(error).lower()}") from error
        except TypeError:
            found[name] = value  # a type that only the generator knows
    return found


def _fields(attribute: Any) -> set[str]:
    """The parameters that an attribute of a curriculum sets."""
    if isinstance(attribute, RangeAttributeDefinition):
        return {attribute.lower_field_name, attribute.upper_field_name}
    return {attribute.field_name}


def _named(generator: Generator, level: int | None) -> str:
    given = ", ".join(f"{name} = {value!r}" for name, value in generator.parameters.items())
    at = "" if level is None else f" at level {level}"
    return f"generator {generator.name!r}{at}{f' with {given}' if given else ''}"


def _told(error: BaseException) -> str:
    """What an error says; its kind where it says nothing, as a bare assert does."""
    text = " ".join(str(error).split())[:500]
    return text if text and isinstance(error, AssertionError | ValueError) else f"{type(error).__name__} {text}".strip()
