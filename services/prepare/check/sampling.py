"""Findings about the section [data]."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gspo_services.prepare.check.code import CodeReport
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import Situation


def sampling_findings(situation: Situation, report: CodeReport | None) -> Iterator[Finding]:
    """``report``: what the worker has found of the tasks; None where it was not asked."""
    settings = situation.settings
    data, batch = settings.data, settings.batch
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
