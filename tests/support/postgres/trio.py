"""Three servers: one that takes commits, and two of which one must have each of them."""

import contextlib
from collections.abc import Iterator

from tests.support.postgres.server import PostgresServer, postgres_folder

STANDBYS = "ANY 1 (node0, node1, node2)"


class Trio:
    """What Patroni or CloudNativePG does, by hand: promote, follow, rebuild."""

    def __init__(self, nodes: list[PostgresServer]) -> None:
        self.nodes = nodes
        self.primary = nodes[0]

    @property
    def conninfo(self) -> str:
        """All of them; a client takes the one that takes commits."""
        ports = ",".join(str(node.port) for node in self.nodes)
        hosts = ",".join("127.0.0.1" for _ in self.nodes)
        return f"host={hosts} port={ports} dbname=postgres user=postgres target_session_attrs=read-write"

    def fail_over(self) -> None:
        """After the primary's death: promote the standby that has most, and let the other one follow it."""
        alive = [node for node in self.nodes if node is not self.primary]
        received = "SELECT pg_last_wal_receive_lsn() - '0/0'::pg_lsn"
        self.primary = max(alive, key=lambda node: node.sql(received)[0][0])
        self.primary.promote()
        for node in alive:
            if node is not self.primary:
                node.follow(self.primary)

    def rebuild(self, dead: PostgresServer) -> None:
        """Make the dead one a standby of the present primary."""
        dead.copy_from(self.primary)
        dead.start()


@contextlib.contextmanager
def trio() -> Iterator[Trio]:
    with postgres_folder() as folder:
        nodes = [PostgresServer(folder, f"node{number}", synchronous_standby_names=STANDBYS) for number in range(3)]
        try:
            nodes[0].make()
            nodes[0].start()
            for node in nodes[1:]:
                node.copy_from(nodes[0])
                node.start()
            yield Trio(nodes)
        finally:
            for node in nodes:
                node.stop()
