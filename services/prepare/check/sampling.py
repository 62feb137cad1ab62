"""Findings about the choice of tasks: the section [data], and ladders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from gspo_services.prepare.check.code import CodeReport
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import Situation

MOST_NAMED: Final = 6
"""Ladders that one line names."""


def sampling_findings(situation: Situation, report: CodeReport | None) -> Iterator[Finding]:
    """``report``: what the worker has found of the tasks; None where it was not asked."""
    settings = situation.settings
    data, batch = settings.data, settings.batch
    if report is not None:
        yield from _ladders(situation, report)
    if data.dynamic_sampling:
        most = math.ceil(data.max_filtered * batch.groups_per_batch)
        yield Finding(
            check="dynamic sampling", status="note",
            text=f"while a batch of {batch.groups_per_batch} groups fills, up to {most} with zero advantage are filtered "
            "out; the training reward is then that of the others, so look at the held-out reward",
        )  # fmt: skip
    elif situation.is_set("data.max_filtered"):
        yield Finding(check="unused", status="note", text="data.max_filtered: data.dynamic_sampling is false")
    if not data.rest_after_groups:
        if situation.is_set("data.rest_batches"):
            yield Finding(check="unused", status="note", text="data.rest_batches: data.rest_after_groups is 0")
        return
    part = None if report is None else report.part("tasks", split="train")
    if part is None or "num_tasks" not in part:
        return
    num_tasks = part["num_tasks"]
    if num_tasks is None:
        yield Finding(
            check="resting tasks", status="warn", basis="tried",
            text="data.rest_after_groups is set, and the tasks have no end: none comes twice, so none rests",
            way_out="leave data.rest_after_groups out",
        )  # fmt: skip
    elif num_tasks <= data.rest_batches * batch.groups_per_batch:
        yield Finding(
            check="resting tasks", status="warn", basis="tried",
            text=f"a task rests for {data.rest_batches} batches of {batch.groups_per_batch} groups, and there are only "
            f"{num_tasks} tasks: all of them may rest at once",
            way_out=f"set data.rest_batches below {max(2, num_tasks // batch.groups_per_batch)}",
        )  # fmt: skip


def _ladders(situation: Situation, report: CodeReport) -> Iterator[Finding]:
    """Which ladders have levels, the rules by which these change, and ladders that the run is too short to judge."""
    part = report.part("ladders")
    if part is None:
        return
    ladders: list[dict[str, Any]] = part["ladders"]
    rising = [each for each in ladders if each["first_level"] < each["last_level"]]
    by_rule: dict[tuple[Any, ...], list[str]] = {}
    for each in rising:
        span = f"{each['name']} {each['first_level']} to {each['last_level']}"
        by_rule.setdefault((each["num_groups"], each["raise_at"], each["lower_at"]), []).append(span)
    for (num_groups, raise_at, lower_at), spans in by_rule.items():
        yield Finding(
            check="levels", status="ok", basis="tried",
            text=f"{_named(spans)}: each begins at the first; {num_groups} groups of a level raise it at a solve rate of "
            f"{raise_at:g} and lower it at {lower_at:g}",
        )  # fmt: skip
    if flat := len(ladders) - len(rising):
        yield Finding(check="levels", status="ok", text=f"{flat} of {len(ladders)} ladders have one level", basis="tried")
    settings = situation.settings
    groups = settings.run.num_batches * settings.batch.groups_per_batch
    weights = sum(each["weight"] for each in ladders)
    few = [each for each in rising if groups * each["weight"] / weights < each["num_groups"]]
    if few:
        yield Finding(
            check="levels", status="warn", basis="estimated",
            text=f"the run has {groups:,} groups, too few to judge a level of {_named([each['name'] for each in few])} once",
            way_out="use fewer ladders, lower num_groups, or raise run.num_batches",
        )  # fmt: skip


def _named(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
