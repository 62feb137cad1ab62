"""Logs in a test's database, led by the test."""

from gspo_services.broker.standby.database import Database, DatabaseLog, claim, leader_of, open_log
from tests.support.postgres.fixtures import SynchronousDatabase


def opened_log(
    postgres: SynchronousDatabase,
    schema: str,
    *,
    holder: str = "one",
    conninfo: str = "",
    statement_s: float = 10.0,
    fingerprint: str = "f",
    run_id: str = "run",
) -> DatabaseLog:
    """A log that ``holder`` leads from now on."""
    database = Database(conninfo or postgres.conninfo, schema, allow_asynchronous=False, statement_s=statement_s)
    open_log(database, fingerprint=fingerprint, run_id=run_id)
    log = DatabaseLog(database)
    epoch = claim(database, leader_of(database), holder)
    assert epoch is not None
    log.epoch = epoch
    return log
