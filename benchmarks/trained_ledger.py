"""A ledger that has trained any number of batches, as a broker wrote it: what a resume is measured on.

It holds trained batches of 32 groups of 8 trajectories (two chunks of 40 tokens each), and one batch's groups that are
still under way.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gspo_protocol.messages import Chunk, GroupSampling, Segment, VersionRun
from gspo_services.broker.ledger import batch_stats
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.rows import BatchRow, CheckpointedRow, GroupRow, Row, TrainedRow, TrajectoryRow, VersionRow
from gspo_services.broker.store import LEDGER_FILE, RowChanges, Store, stored_chunk
from gspo_services.shared.settings import Settings, write_run_settings
from gspo_services.shared.settings.sections import BatchSection, Run

SAMPLING = GroupSampling(1.0, 16, 256, 256)

GROUP_SIZE, GROUPS_PER_BATCH, CHUNK_TOKENS, PROMPT_TOKENS = 8, 32, 40, 8
ACTION_TOKENS = 2 * CHUNK_TOKENS - PROMPT_TOKENS
NUM_METRICS = 60


def members(group_id: int, version: int, status: str) -> Iterator[TrajectoryRow]:
    for number in range(GROUP_SIZE):
        done = status == "finished"
        yield TrajectoryRow(
            trajectory_id=group_id * GROUP_SIZE + number,
            group_id=group_id,
            status="finished" if done else "free",
            epoch=1,
            num_tokens=2 * CHUNK_TOKENS,
            num_action_tokens=ACTION_TOKENS,
            version_sum=ACTION_TOKENS * version,
            min_version=version,
            num_turns=1,
            finish_reason="done" if done else None,
            turn_rewards=(float(number % 2),) if done else (),
        )


def chunks(row: TrajectoryRow, version: int, arrays: tuple[Any, Any]) -> list[Any]:
    stored = []
    for start in (0, CHUNK_TOKENS):
        num_prompt = PROMPT_TOKENS if start == 0 else 0
        prompt = [Segment("observation", 0, num_prompt)] if num_prompt else []
        of_prompt = [VersionRun(-1, num_prompt)] if num_prompt else []
        chunk = Chunk(
            trajectory_id=row.trajectory_id,
            epoch=1,
            offset=start,
            num_tokens=CHUNK_TOKENS,
            segments=[*prompt, Segment("action", 0, CHUNK_TOKENS - num_prompt)],
            version_runs=[*of_prompt, VersionRun(version, CHUNK_TOKENS - num_prompt)],
        )
        stored.append(stored_chunk(chunk, *arrays))
    return stored


def num_batches_of(num_trajectories: int) -> int:
    """Whole batches."""
    return round(num_trajectories / GROUP_SIZE / GROUPS_PER_BATCH)


def write_ledger(directory: Path, num_trajectories: int, *, fingerprint: str = "f", num_uncheckpointed: int = 0) -> None:
    """Make a run that has trained ``num_trajectories`` (rounded to whole batches).

    No checkpoint covers the last ``num_uncheckpointed`` batches.
    """
    directory.mkdir(parents=True)
    batch_section = BatchSection(group_size=GROUP_SIZE, groups_per_batch=GROUPS_PER_BATCH)
    num_batches = num_batches_of(num_trajectories)
    last_checkpointed = num_batches - num_uncheckpointed
    arrays = (np.arange(CHUNK_TOKENS, dtype=np.int32), np.zeros(CHUNK_TOKENS, dtype=np.float32))
    with Store(directory / LEDGER_FILE, fingerprint=fingerprint, run_id="benchmark") as store:
        write_run_settings(Settings(run=Run(directory=directory), batch=batch_section))
        for batch in range(num_batches + 1):
            under_way = batch == num_batches
            version = batch + 1
            rows: list[Row] = [
                VersionRow(
                    policy_version=version, endpoint="tcp://x", digest="d", num_bytes=1, trained_batches=batch, vocabulary=0
                )
            ]
            groups, stored = [], []
            for group_id in range(batch * GROUPS_PER_BATCH, (batch + 1) * GROUPS_PER_BATCH):
                group = list(members(group_id, version, "free" if under_way else "finished"))
                groups.append(group)
                status = "open" if under_way else "batched"
                rows += group
                rows.append(
                    GroupRow(
                        group_id=group_id,
                        split="train",
                        prompt=group_id,
                        task_index=group_id,
                        evaluation=None,
                        sampling=SAMPLING,
                        status="open" if status == "open" else "batched",
                        batch=None if under_way else batch,
                    )
                )
                stored += [chunk for row in group for chunk in chunks(row, version, arrays)]
            line: dict[str, Any] = {"event": "batch", "batch": batch, "policy_version": version + 1, "time_s": float(batch)}
            if not under_way:
                ids = tuple(group[0].group_id for group in groups)
                rows.append(
                    BatchRow(
                        index=batch,
                        policy_version=version,
                        group_ids=ids,
                        stats=batch_stats(version, groups),
                        samplings=(SAMPLING,) * len(ids),
                    )
                )
                checkpointed = CheckpointedRow(next_batch=min(batch + 1, last_checkpointed))
                rows += [TrainedRow(index=batch, policy_version=version + 1), checkpointed]
                line |= {f"metric_{number}": number / 7 for number in range(NUM_METRICS)}
            store.commit(RowChanges(rows=rows, chunks=stored, lines=[] if under_way else [line]))
        MetricsFile(directory / METRICS_FILE).append(store.metrics_after(0))
