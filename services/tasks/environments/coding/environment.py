"""Programs as answers: what ``code`` and ``contest`` have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gspo.tasks.environments import ChatMessage, Environment, RewardJob, Split, Start, State, Step, Task, TaskSource
from gspo_services.tasks.environments.coding.generated_tests import generated_tests_of
from gspo_services.tasks.environments.coding.options import CodeOptions
from gspo_services.tasks.environments.coding.tasks import content_of_program_task, program_task
from gspo_services.tasks.environments.layouts import ProgramRow, program_row, recognised
from gspo_services.tasks.environments.programs import Problem, ProgramTest, Toolchain, program_in
from gspo_services.tasks.environments.rows import num_characters
from gspo_services.tasks.environments.sources import RowPlace, TaskReading, chat_messages, tasks_of_split


class ProgramEnvironment(Environment):
    """One problem, one answer with a program, scored by tests in the sandbox."""

    options_type = CodeOptions
    name = "code"

    def __init__(self, options: CodeOptions) -> None:
        """Raises: ValueError when the options name a language that is not known."""
        self._options = options
        known = options.all_toolchains()
        unknown = [language for language in options.languages if language not in known]
        if unknown or not options.languages:
            raise ValueError(
                f"languages is {list(options.languages)}: expected some of {', '.join(sorted(known))}; say how another one "
                "runs in toolchains"
            )
        self._allowed: dict[str, Toolchain] = {language: known[language] for language in options.languages}
        self._rules = msgspec.to_builtins(options.rules(self.testlib()))

    @property
    def reward_probes(self) -> Sequence[RewardJob]:
        """A program in each language that prints 7."""
        test = Problem(tests=[ProgramTest(input="", output="7")])
        task: Task = {"place": "a trial", "problem": msgspec.to_builtins(test)}
        return [self._job(toolchain.probe, language).for_task(task) for language, toolchain in self._allowed.items()]

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's file, in its order. Raises: ValueError that names the file and line of a bad row."""
        options = self._options
        reading = TaskReading(
            self._read, options.on_bad_row, options.id_column, options.filter, self.kept_by, content_of_program_task,
            layout=lambda record: options.layout or recognised(record),
        )  # fmt: skip
        return tasks_of_split(f"{self.name} environment", split, options, reading)

    kept_by = "since, until and the filter"
    """The options that leave problems out."""

    def start(self, task: Task, seed: int) -> Start:
        """Say the problem, by the row's own messages where it has some; nothing in this environment is random."""
        state: State = {"language": task["language"]} if "language" in task else {}
        prompt = task["prompt"]
        if isinstance(prompt, list):
            return Start(state=state, messages=chat_messages("prompt", prompt))
        messages: list[ChatMessage] = []
        options = self._options
        problem = task["problem"]
        assert isinstance(problem, dict)
        system = options.function_prompt if problem.get("function") else options.system_prompt
        if system:
            messages.append({"role": "system", "content": system})
        messages.append({"role": "user", "content": str(prompt)})
        return Start(state=state, messages=messages)

    def step(self, state: State, action: str) -> Step:
        """Have the program scored; the episode is over."""
        asked = str(state.get("language", ""))
        found = program_in(
            action, {asked: self._allowed[asked]} if asked else self._allowed, unfenced=self._options.unfenced
        )
        job = self._job(None, self._options.languages[0]) if found is None else self._job(found.source, found.language)
        return Step(state=state, messages=[], reward=job, done=True)

    def testlib(self) -> str:
        """The text of testlib.h; "" where no checker needs it."""
        return ""

    def keeps(self, row: ProgramRow) -> bool:
        """Whether the options keep a problem. Raises: ValueError for a row that lacks what decides, or is no task of this
        kind."""
        options = self._options
        if row.checker is not None:
            raise ValueError('it has a checker: the environment "contest" runs checkers')
        return in_window(row, options)

    def _read(self, record: dict[str, Any], where: RowPlace) -> tuple[Task, int] | None:
        options = self._options
        row = program_row(record, options.layout)
        if not row.tests and not row.num_generated:
            raise ValueError("it has no tests, so that no program could be scored")
        if row.language and row.language not in self._allowed:
            raise ValueError(f'it asks for a program in "{row.language}": add that to languages, or leave the row out')
        if not self.keeps(row):
            return None
        generated = generated_tests_of(row, where.file, options.generated_tests_path)
        task = program_task(row, str(where.file), where.place, options.layout, generated)
        return task, num_characters(task["prompt"])

    def _job(self, source: str | None, language: str) -> RewardJob:
        toolchains: Mapping[str, Any] = msgspec.to_builtins(self._options.all_toolchains())
        return RewardJob(
            grader="programs",
            arguments={"source": source, "language": language, "toolchains": dict(toolchains), "rules": self._rules},
            with_task=True,
            weights={"tests_passed" if self._options.partial_credit else "solved": 1.0},
        )


def in_window(row: ProgramRow, options: CodeOptions) -> bool:
    """Whether a problem was published between the options' days. Raises: ValueError for a row without a date."""
    if options.since is None and options.until is None:
        return True
    if row.date is None:
        raise ValueError("it has no date, and since or until ask for one")
    return (options.since is None or row.date >= options.since) and (options.until is None or row.date < options.until)
