"""Checks of what the worker has found: tokenizer, template, tasks, lengths, rewards, agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from gspo_services.prepare.check.code import CodeReport
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import Situation

MOST_SHOWN: Final = 300
MOST_ANSWERS: Final = 10
"""Answers that are shown with what they are read as."""


def code_findings(situation: Situation, report: CodeReport) -> Iterator[Finding]:
    """One finding for each thing that the worker has opened, or could not."""
    yield from _tokenizer(situation, report.part("tokenizer"))
    yield from _template(report.part("template"))
    yield from _tasks(situation, report)
    yield from _lengths(situation, report)
    yield from _episode(situation, report)
    if report.end:
        last = report.said.rpartition("\n")[2] if report.said else "it said nothing"
        yield Finding(
            check="your code", status="fail", text=f"{report.end} ({last[:MOST_SHOWN]})", basis="tried",
            way_out="import and try it by itself: `gspo env try CONFIG --echo`; --timeout S gives it longer",
        )  # fmt: skip


def prompt_tokens(report: CodeReport) -> float | None:
    """The mean prompt, where it was measured."""
    part = report.part("prompts", split="train")
    return None if part is None or not part.get("measured") else float(part["mean"])


def _tokenizer(situation: Situation, part: Mapping[str, Any] | None) -> Iterator[Finding]:
    if part is None:
        return
    if "error" in part:
        text = str(part["error"])
        if situation.elsewhere and "no such file" in text:
            yield situation.missing("tokenizer", f"{situation.model_path} has no tokenizer.", "")
            return
        yield Finding(
            check="tokenizer", status="fail", text=text, basis="tried",
            way_out="put tokenizer.json, tokenizer_config.json and the chat template into the model's directory",
        )  # fmt: skip
        return
    stops = ", ".join(part["stops"])
    yield Finding(
        check="tokenizer", status="ok", text=f"{part['vocabulary']:,} tokens; a turn ends at {stops}", basis="tried"
    )


def _template(part: Mapping[str, Any] | None) -> Iterator[Finding]:
    if part is None:
        return
    if part.get("reads_clock"):
        today = datetime.now().strftime("%d %b %Y")
        yield Finding(
            check="chat template", status="note", basis="tried",
            text="it writes the date of the day: all prompts of a run have that of its first start",
            way_out=f'for the same in other runs and in gspo eval: model.template_arguments = {{ date_string = "{today}" }}',
        )  # fmt: skip
    if "refuses" in part or not part["keeps_answers"]:
        text = str(part.get("refuses", "it drops what the assistant said"))
        yield Finding(
            check="chat template", status="fail", text=text, basis="tried",
            way_out="use the template of a chat model: chat_template.jinja in the model's directory",
        )  # fmt: skip
    elif not part["opens_answers"]:
        yield Finding(
            check="chat template", status="fail", text="it ignores add_generation_prompt: a prompt does not open an answer",
            basis="tried", way_out="end the template with the beginning of an assistant's turn if add_generation_prompt",
        )  # fmt: skip
    elif "does_not_go_on" in part:
        yield Finding(
            check="chat template", status="warn", text=f"an episode has one turn: {part['does_not_go_on']}", basis="tried",
            way_out="use a template that keeps answers where they were: chat_template.jinja in the model's directory",
        )  # fmt: skip
    elif not part["ends_answers"]:
        stops = ", ".join(part["stops"])
        yield Finding(
            check="chat template", status="warn", text=f"it ends an answer with no token at which sampling stops ({stops})",
            basis="tried",
            way_out="name the template's last token as eos_token_id in generation_config.json, or answers go on",
        )  # fmt: skip
    else:
        without = "" if part["takes_system"] else "; it leaves system messages out"
        yield Finding(check="chat template", status="ok", text=f"opens and ends answers{without}", basis="tried")


def _tasks(situation: Situation, report: CodeReport) -> Iterator[Finding]:
    environment = situation.settings.environment
    for split in ("train", "eval"):
        part = report.part("tasks", split=split)
        if part is None:
            continue
        broken = next((each for each in report.parts if each.get("split") == split and "error" in each), None)
        if broken is not None:
            text = str(broken["error"])
            if situation.elsewhere and "there is no file" in text:
                yield situation.missing(f"{split} tasks", f"{text.splitlines()[0]}.", "")
            else:
                way_out = "correct environment.options, the file or the code; `gspo env try CONFIG --echo` shows one episode"
                yield Finding(check=f"{split} tasks", status="fail", text=text, way_out=way_out, basis="tried")
            continue
        yield from _number(situation, split, part["num_tasks"], environment.name)
        yield from _layout(split, part)
        yield from _answers(split, report.part("answers", split=split))
    yield from _sets(situation, report)
    overlap = report.part("overlap")
    if overlap is not None and overlap["both"]:
        yield Finding(
            check="eval tasks", status="warn", text=f"{overlap['both']} of {overlap['eval']} are training tasks, too",
            basis="tried", way_out="take them out of one of the files: evaluation would show what was learnt by heart",
        )  # fmt: skip


def _layout(split: str, part: Mapping[str, Any]) -> Iterator[Finding]:
    """What was recognised in the rows of files."""
    said = [f"laid out as {', '.join(part['layouts'])}"] if part.get("layouts") else []
    if repeated := part.get("num_repeated"):
        said.append(f"{repeated:,} rows are there already and count once")
    if said:
        yield Finding(check=f"{split} rows", status="ok", text="; ".join(said), basis="tried")
    yield from _columns(split, part.get("columns", ()))


def _columns(split: str, sources: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """What became of each column; sources of the same columns share a finding."""
    by_use: dict[str, list[str]] = {}
    for source in sources:
        by_use.setdefault(source["said"], []).append(source["source"])
    lost = {said: each["suspicious"] for said in by_use for each in sources if each["said"] == said and each["suspicious"]}
    for said, names in by_use.items():
        text = said if len(by_use) == 1 else f"{', '.join(names)[:MOST_SHOWN]}: {said}"
        if said not in lost:
            yield Finding(check=f"{split} columns", status="ok", text=text, basis="tried")
            continue
        yield Finding(
            check=f"{split} columns", status="warn", basis="tried",
            text=f"{text}. What is left out may be a part of the question: {', '.join(lost[said])}",
            way_out="show it: environment.options.context_columns or choices_column; or take the column out of the rows",
        )  # fmt: skip


def _answers(split: str, part: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What the answers are read as: each was found right for itself when the tasks were loaded."""
    if part is None or not part["numbers"]:
        return
    numbers: dict[str, int] = part["numbers"]
    text = f"{sum(numbers.values()):,} read: " + ", ".join(f"{number:,} {_FORMS[form]}" for form, number in numbers.items())
    shown = {form: part["examples"][form][: MOST_ANSWERS // len(numbers) or 1] for form in numbers if form != "number"}
    text += "".join(f"; {_FORMS[form]}: {', '.join(golds)[:MOST_SHOWN]}" for form, golds in shown.items())
    if "beyond" in numbers:
        yield Finding(
            check=f"{split} answers", status="note", text=text, basis="tried",
            way_out="docs/guide/programs.md says how each kind is compared; leave out rows that should pay nobody",
        )  # fmt: skip
    else:
        yield Finding(check=f"{split} answers", status="ok", text=text, basis="tried")
    if again := part["said_again"]:
        yield Finding(
            check=f"{split} questions", status="warn", basis="tried",
            text=f"{len(again)} of {part['asked']} tried are graded right for their own arithmetic: {again[0][:MOST_SHOWN]}",
            way_out='set environment.options.kind = "number": a policy learns to repeat the question',
        )  # fmt: skip


_FORMS: Final = {
    "number": "numbers", "expression": "expressions", "several": "lists (in any order) and points",
    "interval": "pairs and intervals", "equation": "equations", "matrix": "matrices", "words": "words",
    "choice": "choices", "date": "dates", "countdown": "targets with their numbers", "beyond": "for math-verify alone",
}  # fmt: skip


def _sets(situation: Situation, report: CodeReport) -> Iterator[Finding]:
    """The named evaluation sets."""
    for name, terms in situation.settings.evaluation.sets.items():
        part = report.part("set", set=name)
        if part is None:
            continue
        check = f"set {name}"
        if "error" in part:
            way_out = f"correct evaluation.sets.{name}, its files or its code"
            yield Finding(check=check, status="fail", text=str(part["error"]), way_out=way_out, basis="tried")
            continue
        text = f"{part['num_tasks']:,} tasks, {terms.samples} samples of each: {', '.join(part['metrics'])}"
        yield Finding(check=check, status="ok", text=text, basis="tried")


def _number(situation: Situation, split: str, number: int | None, name: str) -> Iterator[Finding]:
    settings = situation.settings
    if number is None:
        yield Finding(check=f"{split} tasks", status="ok", text=f'endless, from "{name}"', basis="tried")
        return
    if number == 0:
        yield Finding(
            check=f"{split} tasks",
            status="fail",
            text=f'"{name}" has none',
            basis="tried",
            way_out="give it a task at least",
        )
        return
    if split == "eval":
        asked = settings.evaluation.num_tasks
        fewer = f"; evaluation.num_tasks is {asked}, so each evaluation has {number}" if asked > number else ""
        yield Finding(check="eval tasks", status="note" if fewer else "ok", text=f"{number:,}{fewer}", basis="tried")
        return
    groups = settings.run.num_batches * settings.batch.groups_per_batch
    text = f'{number:,}, from "{name}"; the run takes {groups:,}: {groups / number:.2g} epochs'
    if number < settings.batch.groups_per_batch:
        yield Finding(
            check="train tasks", status="warn", text=f"{text}; a batch has {settings.batch.groups_per_batch} groups",
            basis="tried", way_out="add rows, or lower batch.groups_per_batch: every batch repeats some tasks",
        )  # fmt: skip
    else:
        yield Finding(check="train tasks", status="ok", text=text, basis="tried")


def _lengths(situation: Situation, report: CodeReport) -> Iterator[Finding]:
    sampling = situation.settings.sampling
    for split in ("train", "eval"):
        part = report.part("prompts", split=split)
        if part is None or not part.get("measured"):
            continue
        longest, where = int(part["longest"]), f"task {part['longest_task']}"
        check = f"{split} prompts"
        text = f"{part['mean']:.0f} tokens on average, {longest} at most ({where}, of {part['measured']} measured)"
        room = sampling.max_tokens - longest
        if part["too_long"]:
            yield Finding(
                check=check, status="fail", basis="tried",
                text=f"{text}; {part['too_long']} leave no room for an answer: sampling.max_tokens is {sampling.max_tokens}",
                way_out=f"raise sampling.max_tokens to {longest + sampling.max_turn_tokens} or more, or leave such rows out",
            )  # fmt: skip
        elif room < sampling.max_turn_tokens:
            yield Finding(
                check=check, status="warn", basis="tried",
                text=f"{text}; beside the longest, an answer has {room} tokens of sampling.max_turn_tokens = "
                f"{sampling.max_turn_tokens}",
                way_out=f"raise sampling.max_tokens to {longest + sampling.max_turn_tokens}",
            )  # fmt: skip
        else:
            yield Finding(check=check, status="ok", text=text, basis="tried")


def _episode(situation: Situation, report: CodeReport) -> Iterator[Finding]:
    code = report.part("code")
    what = "agent" if situation.settings.agent.is_used else "reward"
    if code is not None and "error" in code:
        text = str(code["error"])
        way_out = "the module must be installed, or lie in the directory that the command is started in"
        if "reward.variables" in text:
            way_out = "set it in the shell, or leave it out of reward.variables"
        found = Finding(check=what, status="fail", text=text, way_out=way_out, basis="tried")
        is_missing = situation.elsewhere and _is_of_this_machine(text)
        yield situation.missing(what, text, way_out) if is_missing else found
    elif code is not None:
        text = "its code was imported in a worker" if not situation.settings.agent.url else "a service: not asked here"
        yield Finding(check=what, status="ok", text=text, basis="tried")
    episode = report.part("episode")
    if episode is None:
        return
    if episode["reward"] is None:
        yield Finding(
            check="episode", status="fail", text=f"an echo has no reward: {episode['failure']}", basis="tried",
            way_out="`gspo env try CONFIG --echo` shows messages, tokens and the line of your code",
        )  # fmt: skip
        return
    parts = ", ".join(f"{name} {value:.4g}" for name, value in episode["components"].items())
    text = f"an echo of task 0 gets {episode['reward']:.4g}{f' ({parts})' if parts else ''} in {episode['turns']} turns"
    slow = (episode["seconds"] > 1.0 and f", {episode['seconds']:.1f} s of your code") or ""
    yield Finding(check="episode", status="ok", text=text + slow, basis="tried")


def _is_of_this_machine(text: str) -> bool:
    """Whether something is only not installed or not set here."""
    return "no such program" in text or "reward.variables" in text or "there is no module" in text
