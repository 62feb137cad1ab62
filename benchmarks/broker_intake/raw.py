"""The two halves of a broker with nothing in between, each in its own processes.

    python -m benchmarks.broker_intake.raw sqlite PATH CHUNK_TOKENS
    python -m benchmarks.broker_intake.raw router CURVE_SECRET_KEY|-
    python -m benchmarks.broker_intake.raw dealer ENDPOINT CHUNK_TOKENS CURVE_SERVER_KEY|-

sqlite: the store's own tables and pragmas, with rows made beforehand. {"chunks": N, "per_commit": R, "leases": L} commits
R chunks at a time, of L trajectories in turn, together with those rows of their trajectories that a broker writes.
router: {"messages": N} receives N messages and measures from the first. dealer: {"messages": N} sends as fast as it can.
"""

import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from benchmarks.broker_intake.child import serve
from benchmarks.broker_intake.load import CHUNKS_PER_TRAJECTORY, a_chunk, arrays_of
from gspo_protocol.channels import WORK
from gspo_protocol.codec import encode
from gspo_services.broker.ledger import MOST_BEHIND
from gspo_services.broker.rows import TrajectoryRow
from gspo_services.broker.store import stored_chunk
from gspo_services.broker.store.schema import CREATE, TABLES

INSERT_CHUNK = "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class RawStore:
    """A database like the broker's, written without the broker."""

    def __init__(self, path: Path, chunk_tokens: int) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(CREATE)
        self._chunk_tokens = chunk_tokens
        self._next = 0

    def close(self) -> None:
        self._connection.close()

    def write(self, num_chunks: int, per_commit: int, num_leases: int) -> tuple[float, float]:
        """Return wall and CPU seconds of the commits alone."""
        rows = [
            self._rows(range(first, min(first + per_commit, num_chunks)), num_leases)
            for first in range(0, num_chunks, per_commit)
        ]
        self._next += -(-num_chunks // num_leases // CHUNKS_PER_TRAJECTORY) * num_leases + num_leases
        insert_trajectory = TABLES[TrajectoryRow].insert
        wall, cpu = time.perf_counter(), time.process_time()
        for chunks, trajectories in rows:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(insert_trajectory, trajectories)
            self._connection.executemany(INSERT_CHUNK, chunks)
            self._connection.execute("COMMIT")
        return time.perf_counter() - wall, time.process_time() - cpu

    def _rows(self, numbers: range, num_leases: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        table = TABLES[TrajectoryRow]
        arrays = arrays_of(self._chunk_tokens)
        chunks = []
        trajectories: dict[int, tuple[Any, ...]] = {}
        for number in numbers:
            turn, lease = divmod(number, num_leases)
            generation, place = divmod(turn, CHUNKS_PER_TRAJECTORY)
            trajectory_id = self._next + generation * num_leases + lease
            start = place * self._chunk_tokens
            stored = stored_chunk(
                a_chunk(trajectory_id, 1, start, self._chunk_tokens), arrays["token_ids"], arrays["logprobs"]
            )
            chunks.append(tuple(stored))
            if place % MOST_BEHIND and place < CHUNKS_PER_TRAJECTORY - 1:
                continue
            row = TrajectoryRow(
                trajectory_id=trajectory_id,
                group_id=trajectory_id // 8,
                status="leased",
                epoch=1,
                holder_peer="rollout-0",
                holder_session="s",
                num_tokens=start + self._chunk_tokens,
                num_action_tokens=start + self._chunk_tokens,
                version_sum=start + self._chunk_tokens,
                min_version=1,
                lease_version=1,
                num_turns=1,
            )
            trajectories[trajectory_id] = table.values(row)
        return chunks, list(trajectories.values())


def sqlite(path: Path, chunk_tokens: int) -> None:
    store = RawStore(path, chunk_tokens)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        wall, cpu = store.write(request["chunks"], request["per_commit"], request["leases"])
        return {"seconds": wall, "cpu_s": cpu}

    serve(answer)


def router(secret_key: str) -> None:
    """Run a ROUTER with the work channel's bounds; print its endpoint first."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVHWM, WORK.window)
    if secret_key != "-":
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, secret_key)
    socket.bind("tcp://127.0.0.1:*")

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "endpoint" in request:
            return {"endpoint": socket.getsockopt_string(zmq.LAST_ENDPOINT)}
        socket.recv_multipart()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(request["messages"] - 1):
            socket.recv_multipart()
        return {"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}

    serve(answer)


def dealer(endpoint: str, chunk_tokens: int, server_key: str) -> None:
    """Make the frames that a rollout sends, once."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, WORK.window)
    if server_key != "-":
        public, secret = zmq.curve_keypair()
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.connect(endpoint)
    frames = encode(a_chunk(12345, 1, chunk_tokens, chunk_tokens), arrays_of(chunk_tokens), seq=12345)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        for _ in range(request["messages"]):
            socket.send_multipart(frames)
        return {"sent": request["messages"]}

    serve(answer)


def main() -> None:
    kind, *arguments = sys.argv[1:]
    if kind == "sqlite":
        sqlite(Path(arguments[0]), int(arguments[1]))
    elif kind == "router":
        router(arguments[0])
    else:
        dealer(arguments[0], int(arguments[1]), arguments[2])


if __name__ == "__main__":
    main()
