"""Bytes of a million trajectories of 8,000 tokens, in the ledger and in the archive, and what archiving costs.

    python benchmarks/archive_size.py --data ../shared/data/gsm8k/train.jsonl --directory /tmp/archive-size

Token ids: GSM8K's text in the tokens of a byte-pair tokenizer that is trained on it; a group's trajectories share a prompt
and differ otherwise. Log-probs: as SGLang computes them, log(softmax(x)) in float32 of logits in bfloat16, sampled. The
logits are random, with entropies like those of reasoning models (arXiv 2506.01939): half of the tokens below 0.01, one in
five above 0.67.
"""

import argparse
import asyncio
import json
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from gspo_protocol.messages import Chunk, GroupSampling, Segment, VersionRun
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.retention import Retention
from gspo_services.broker.rows import BatchRow, BatchStats, CheckpointedRow, GroupRow, LengthStats, Row, TrajectoryRow
from gspo_services.broker.store import LEDGER_FILE, RowChanges, Store, stored_chunk
from gspo_services.shared.runtime.clock import MonotonicClock

SAMPLING = GroupSampling(1.0, 8191, 8192, 8192)

LENGTH, GROUP_SIZE, PROMPT_TOKENS, CHUNK_TOKENS = 8000, 8, 150, 64
VOCABULARY = 2048
AT_ONCE = 2000
MILLION = 1_000_000


def text_tokens(path: Path) -> tuple[np.ndarray, int]:
    """All of the data set as token ids, and the size of the vocabulary."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [f"{row['question']}\n{row['answer']}\n\n" for row in rows]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    ids = np.concatenate([np.array(each.ids, dtype="<i4") for each in tokenizer.encode_batch(texts)])
    return ids, tokenizer.get_vocab_size()


def sampled_logprobs(rng: np.random.Generator, number: int) -> np.ndarray:
    """Log-probs of sampled tokens."""
    found = []
    for _ in range(0, number, AT_ONCE):
        logits = rng.standard_normal((AT_ONCE, VOCABULARY), dtype=np.float32) * np.float32(1.5)
        kind, place = rng.random(AT_ONCE), rng.random(AT_ONCE)
        lead = np.where(kind < 0.55, 7 + 13 * place, np.where(kind < 0.8, 2.6 + 4.4 * place, 0.2 + 2.4 * place))
        logits[:, 0] = np.log(np.exp(logits).sum(axis=1)) + lead
        rival = logits[:, 0] - 2 * rng.random(AT_ONCE)
        logits[:, 1] = np.where(kind > 0.8, rival, logits[:, 1])
        # bfloat16: the upper half of the bits.
        logits = ((logits + np.float32(10)).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        chosen = (probabilities.cumsum(axis=1) < rng.random((AT_ONCE, 1))).sum(axis=1).clip(0, VOCABULARY - 1)
        found.append(np.log(probabilities[np.arange(AT_ONCE), chosen]))
    return np.concatenate(found)[:number].astype("<f4")


def write_run(directory: Path, ids: np.ndarray, num_groups: int, observed: float, rng: np.random.Generator) -> None:
    """A ledger of ``num_groups`` batches of one group. ``observed``: the share of observation tokens after the prompt."""
    store = Store(directory / LEDGER_FILE, fingerprint="f", run_id="size")
    at = 0
    for index in range(num_groups):
        prompt, at = ids[at : at + PROMPT_TOKENS], at + PROMPT_TOKENS
        for member in range(GROUP_SIZE):
            if at + LENGTH > len(ids):
                at = int(rng.integers(0, 1000))
            tokens = np.concatenate([prompt, ids[at : at + LENGTH - PROMPT_TOKENS]])
            at += LENGTH - PROMPT_TOKENS
            # Turns of 400 tokens: the first part is the policy's, the rest is what a tool answered.
            action = (np.arange(LENGTH) - PROMPT_TOKENS) % 400 < 400 * (1 - observed)
            action[:PROMPT_TOKENS] = False
            logprobs = np.zeros(LENGTH, "<f4")
            logprobs[action] = sampled_logprobs(rng, int(action.sum()))
            store.commit(RowChanges(chunks=list(chunks_of(index * GROUP_SIZE + member, tokens, logprobs, action))))
        store.commit(RowChanges(rows=rows_of(index)))
    store.commit(RowChanges(rows=[CheckpointedRow(next_batch=num_groups)]))
    store.close()


def chunks_of(trajectory_id: int, tokens: np.ndarray, logprobs: np.ndarray, action: np.ndarray) -> Any:
    for start in range(0, LENGTH, CHUNK_TOKENS):
        part = slice(start, min(LENGTH, start + CHUNK_TOKENS))
        own = action[part]
        edges = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]
        runs = [(bool(own[begin]), end - begin) for begin, end in pairwise(edges)]
        chunk = Chunk(
            trajectory_id=trajectory_id,
            epoch=1,
            offset=start,
            num_tokens=len(own),
            segments=[Segment("action" if is_action else "observation", 0, size) for is_action, size in runs],
            version_runs=[VersionRun(3 if is_action else -1, size) for is_action, size in runs],
            state=None,
            turn_done=False,
            turn_rewards=[],
        )
        yield stored_chunk(chunk, tokens[part], logprobs[part])


def rows_of(index: int) -> list[Row]:
    stats = BatchStats(
        num_groups=1, num_trajectories=GROUP_SIZE, num_tokens=GROUP_SIZE * LENGTH, num_action_tokens=0, mean_reward=0.5,
        mean_lag=0.0, max_lag=0, num_zero_advantage_groups=0,
        lengths=LengthStats(mean=LENGTH, p95=LENGTH, max=LENGTH, cut_off=0.0),
    )  # fmt: skip
    members = [
        TrajectoryRow(
            trajectory_id=index * GROUP_SIZE + member, group_id=index, status="finished", epoch=1, num_tokens=LENGTH,
            num_action_tokens=LENGTH, num_turns=1, finish_reason="done", turn_rewards=(1.0,),
        )
        for member in range(GROUP_SIZE)
    ]  # fmt: skip
    group = GroupRow(
        group_id=index,
        split="train",
        prompt=index,
        task_index=index,
        evaluation=None,
        status="batched",
        batch=index,
        sampling=SAMPLING,
    )
    batch = BatchRow(index=index, policy_version=index + 1, group_ids=(index,), stats=stats, samplings=(SAMPLING,))
    return [group, *members, batch]


async def archive(directory: Path, num_groups: int) -> tuple[float, float, list[float]]:
    """Archive all but the last batch. Returns seconds, CPU seconds, and how long the deleting transactions took."""
    file_bytes = (num_groups - 1) * GROUP_SIZE * LENGTH * 8
    retention = Retention(
        directory / LEDGER_FILE, BrokerMetrics(CollectorRegistry()), MonotonicClock(), keep_batches=1, file_bytes=file_bytes
    )
    took: list[float] = []
    done = asyncio.Event()
    with Store(directory / LEDGER_FILE, fingerprint="f", run_id="size") as store:

        async def commit(changes: RowChanges) -> None:
            began = time.perf_counter()
            store.commit(changes)
            took.append(time.perf_counter() - began)
            done.set()

        began, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(retention.run(commit))
            await done.wait()
            result = time.perf_counter() - began, time.process_time() - cpu, took
            task.cancel()
    return result


def measure(directory: Path, ids: np.ndarray, num_groups: int, observed: float) -> dict[str, float]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write_run(directory, ids, num_groups, observed, np.random.default_rng(0))
    before = contents(directory, num_groups)
    ledger_bytes = (directory / LEDGER_FILE).stat().st_size
    seconds, cpu_s, took = asyncio.run(archive(directory, num_groups))
    (file,) = (directory / "archive").iterdir()
    archived = (num_groups - 1) * GROUP_SIZE
    file_bytes = file.stat().st_size
    assert contents(directory, num_groups) == before, "what is read from the archive differs"
    shutil.rmtree(directory)
    return {
        "ledger_gb": ledger_bytes / (num_groups * GROUP_SIZE) * MILLION / 1e9,
        "archived_gb": file_bytes / archived * MILLION / 1e9,
        "seconds": seconds,
        "cpu_ms_per_trajectory": 1000 * cpu_s / archived,
        "delete_ms": 1000 * took[0],
    }


def contents(directory: Path, num_groups: int) -> list[tuple[bytes, bytes]]:
    """Every token and log-prob, as bytes."""
    with Store(directory / LEDGER_FILE, fingerprint="f", run_id="size") as store:
        payloads = [store.payload(number) for number in range(num_groups * GROUP_SIZE)]
    return [(payload.token_ids.tobytes(), payload.logprobs.tobytes()) for payload in payloads]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--directory", type=Path, required=True, help="a directory to write in; removed at the end")
    parser.add_argument("--groups", type=int, default=9, help="groups of 8 trajectories (default: %(default)s)")
    arguments = parser.parse_args()
    ids, vocabulary = text_tokens(arguments.data)
    print(f"{len(ids):,} tokens, vocabulary {vocabulary:,}; {arguments.groups} groups of {GROUP_SIZE} x {LENGTH} tokens\n")
    print("| observations | ledger (GB a million) | archived (GB a million) | CPU (ms a trajectory) | deletion (ms) |")
    print("|---|---|---|---|---|")
    for observed in (0.0, 0.25, 0.5, 0.75):
        found = measure(arguments.directory, ids, arguments.groups, observed)
        print(
            f"| {observed:.0%} | {found['ledger_gb']:.1f} | {found['archived_gb']:.1f} | "
            f"{found['cpu_ms_per_trajectory']:.1f} | {found['delete_ms']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
