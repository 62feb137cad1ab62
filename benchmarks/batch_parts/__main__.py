"""A batch of any size from the ledger to the learner's ranks: memory and time, beside a raw copy of the same bytes.

    python -m benchmarks.batch_parts --json runs/batch_parts.json

A rollout without an engine fills one batch of a real broker process, over its socket. Then ranks without a model take it:
rank 0 through the real connection, all of them through the real sharing (gloo), assembly and packing; every token is
compared. Memory is the growth of a process's largest resident set from before the request. The raw copy reads a file of as
many bytes, sends it through a bare ZeroMQ socket, and broadcasts it to the same ranks, each of which keeps its share.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import zmq
from prometheus_client.parser import text_string_to_metric_families

from gspo_services.shared.runtime.logs import configure_logging
from tests.support.broker.process import BrokerProcess, broker_process
from tests.support.processes.ports import free_ports

MIB: Final = 2**20
RAW_BYTES: Final = 2 * MIB
LOOK_S: Final = 0.1
FILL_S: Final = 3600.0


class Memory(threading.Thread):
    """Looks at a process's resident set until it is told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self._stop_asked = threading.Event()
        self.first = self.most = self._process.memory_info().rss

    def run(self) -> None:
        while not self._stop_asked.wait(LOOK_S / 5):
            self.most = max(self.most, self._process.memory_info().rss)

    def growth(self) -> int:
        """Stop; bytes above those of the beginning."""
        self._stop_asked.set()
        self.join()
        return self.most - self.first


async def complete_groups(broker: BrokerProcess) -> int:
    _, text = await broker.http("/metrics")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "gspo_broker_groups" and sample.labels.get("state") == "complete":
                return int(sample.value)
    return 0


def send_raw(path: Path, socket: "zmq.Socket[bytes]") -> None:
    with path.open("rb") as file:
        while data := file.read(RAW_BYTES):
            socket.send(data)


async def start_ranks(broker: BrokerProcess, number: int, raw: str) -> list[asyncio.subprocess.Process]:
    (port,) = free_ports(1)
    ranks = []
    for rank in range(number):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.batch_parts.rank", str(broker.config), raw]
        pipe = asyncio.subprocess.PIPE
        ranks.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment))
    return ranks


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    if not line:
        raise SystemExit(f"a process ended with status {await process.wait()}: see its log above")
    return line


def settings_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    return {
        "run": {"num_batches": 1},
        "batch": {"group_size": arguments.group_size, "groups_per_batch": arguments.groups, "mini_batches": 2, "max_lag": 0},
        "sampling": {"max_turn_tokens": arguments.tokens - 1, "max_tokens": arguments.tokens},
        "broker": {"idle_lease_s": FILL_S, "lease_s": 600},
        "learner": {"weights_endpoint": "tcp://127.0.0.1:*"},
    }


async def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    num_bytes = 8 * arguments.groups * arguments.group_size * arguments.tokens
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 3)
    raw = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    async with broker_process(directory, **settings_of(arguments)) as broker:
        ranks = await start_ranks(broker, arguments.ranks, raw)
        for rank in ranks:
            assert (await line_of(rank)) == "published\n"
        command = [sys.executable, "-m", "benchmarks.batch_parts.rollout", broker.work_endpoint]
        begin = time.monotonic()
        rollout = await asyncio.create_subprocess_exec(*command, str(arguments.chunk_tokens), str(arguments.tokens))
        async with asyncio.timeout(FILL_S):
            while await complete_groups(broker) < arguments.groups:  # noqa: ASYNC110 - another process, which sets no Event
                await asyncio.sleep(LOOK_S)
        filled_s = time.monotonic() - begin
        rollout.terminate()
        await rollout.wait()
        path = directory / "raw"
        with path.open("wb") as file:
            for _ in range(num_bytes // RAW_BYTES):
                file.write(os.urandom(RAW_BYTES))
            file.write(os.urandom(num_bytes % RAW_BYTES))
        memory, process = Memory(broker.pid), psutil.Process(broker.pid)
        memory.start()
        cpu = sum(process.cpu_times()[:2])
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(b"go\n")
            await rank.stdin.drain()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(send_raw, path, socket))
            found = [json.loads(await line_of(rank)) for rank in ranks]
        for rank in ranks:
            await rank.wait()
        result = {
            "num_bytes": num_bytes,
            "broker_growth_bytes": memory.growth(),
            "broker_bytes": memory.first,
            "broker_cpu_s": sum(process.cpu_times()[:2]) - cpu,
            "ledger_bytes": sum(each.stat().st_size for each in broker.run_directory.glob("ledger.sqlite3*")),
            "filled_s": filled_s,
            "num_parts": broker.last("batch_sent")["num_parts"],
            "ranks": found,
        }
        await broker.terminate()
    return result


def table(result: dict[str, Any]) -> str:
    """The result, and what is asked of it."""
    size = result["num_bytes"]
    lines = [f"{size / MIB:.0f} MiB of token ids and log-probs in {result['num_parts']} parts"]
    lines += [f"broker: grew by {result['broker_growth_bytes'] / MIB:.1f} MiB, {result['broker_cpu_s']:.1f} s of CPU"]
    for rank in result["ranks"]:
        lines.append(
            f"rank {rank['rank']}: grew by {rank['assembled_peak_bytes'] / MIB:.0f} MiB until it had its share, by "
            f"{rank['peak_bytes'] / MIB:.0f} MiB ({rank['peak_bytes'] / size:.2f} of the batch) until it was packed; "
            f"{rank['num_tokens']} tokens compared; {rank['seconds']:.1f} s, {rank['cpu_s']:.1f} s of CPU; raw copy "
            f"{rank['raw_s']:.1f} s, {rank['raw_cpu_s']:.1f} s of CPU"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32_768, help="of each trajectory")
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--directory", type=Path, help="for the ledger: 2.5 times the batch's bytes (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    configure_logging("batch_parts")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        result = asyncio.run(measure(Path(directory), arguments))
    sys.stdout.write(table(result) + "\n")
    if arguments.json is not None:
        result |= {
            "at": datetime.now(tz=UTC).isoformat(),
            "machine": platform.processor(),
            "arguments": str(vars(arguments)),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tokens = sum(rank["num_tokens"] for rank in result["ranks"])
    most = max(rank["peak_bytes"] for rank in result["ranks"])
    if 8 * tokens != result["num_bytes"] or most > 2 * result["num_bytes"]:
        raise SystemExit(f"{tokens} tokens were compared, and a rank grew by {most / result['num_bytes']:.2f} of the batch")


if __name__ == "__main__":
    main()
