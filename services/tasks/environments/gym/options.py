"""The options of the environment ``reasoning_gym``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

AnswerForm = Literal["tagged", "whole"]
"""Where an answer stands: between <answer> and </answer>, or it is the whole text."""
ALL: Final = "all"
UNSOUND: Final[Mapping[str, str]] = {
    "coin_flip": "takes any beginning of the right number, so 0 is right for 0.3125",
    "game_of_life_halting": "takes any text",
    "puzzle24": "takes any four numbers that make 24",
}
"""Generators that "all" leaves out, with what their verifiers do (0.1.25). One who names them gets them."""
SYSTEM_PROMPT: Final = """\
Given a problem, your task is to answer the question by thinking step-by-step in a clear and specific manner.
Once you have thought about the reasoning process, provide the answer in the following format:
<answer>answer here</answer>
Do not explain your reasoning inside the answer tags, provide only the final answer. When an example is provided, you \
should strictly follow the format of the output/answer in that example.
"""
"""The package's own, "default"."""


class GeneratorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generator."""

    name: str
    """As the package calls it: "chain_sum"."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Its share of the tasks is its weight over the sum of all."""
    parameters: dict[str, Any] = {}
    """Values of its configuration, which hold at every level."""
    label: str = ""
    """What its measures are called; "": its name. For a generator that is there twice."""


class CurriculumOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which levels are sampled, and when a level rises or falls."""

    raise_at: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    """The share of solved attempts from which the level rises..."""
    lower_at: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    """...and that up to which it falls."""
    num_groups: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 8
    """Groups that are judged together."""
    first_level: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The level of the first tasks, and the lowest. Generators with fewer levels begin at their last."""
    last_level: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The highest; left out: the last one that a generator has."""


class ReasoningGymOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The generators, and how their tasks are asked."""

    generators: str | tuple[str | GeneratorOptions, ...] = ALL
    """A name; several names or tables {name, weight, parameters, label}; or "all", without those whose verifiers take almost
    any answer."""
    curriculum: bool | CurriculumOptions = True
    """true, or a table {raise_at, lower_at, num_groups, first_level, last_level}: levels rise by the solve rate. false: the
    generators' own defaults."""
    system_prompt: str = SYSTEM_PROMPT
    """The system message; "" for none."""
    answer_form: AnswerForm = "tagged"
    """tagged: the answer is between the last <answer> and </answer>. whole: it is the whole text."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    """Other seeds give other tasks, also held-out ones."""
    num_eval_tasks: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """Size of the held-out split, which has all generators and all levels evenly; the training split is endless."""
    cpu_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """Processor seconds for scoring one answer. A slower one is worth 0."""

    @property
    def rules(self) -> CurriculumOptions | None:
        """None: no curriculum."""
        if isinstance(self.curriculum, CurriculumOptions):
            return self.curriculum
        return CurriculumOptions() if self.curriculum else None

    def chosen(self) -> list[GeneratorOptions]:
        """The generators that are named, each as a table; none: all. Raises: ValueError for an empty list."""
        if self.generators == ALL:
            return []
        named = (self.generators,) if isinstance(self.generators, str) else self.generators
        if not named:
            raise ValueError('generators is empty: name one, such as "chain_sum", or leave it out for all of reasoning-gym')
        return [GeneratorOptions(name=each) if isinstance(each, str) else each for each in named]
