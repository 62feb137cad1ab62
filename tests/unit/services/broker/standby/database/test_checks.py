"""Which servers are refused, and what each refusal says."""

from dataclasses import replace

import pytest

from gspo_services.broker.standby.database import ServerFacts, refusal, waiting

GOOD = ServerFacts(
    version=150009,
    version_text="15.9",
    in_recovery=False,
    read_only=False,
    fsync=True,
    full_page_writes=True,
    standby_names="ANY 1 (*)",
    num_synchronous=1,
    sees_standbys=True,
    may_create=True,
    user="gspo",
)
ALLOW = "; broker.allow_asynchronous_database = true accepts that"


def test_a_server_that_waits_for_another_one_is_taken() -> None:
    assert (refusal(GOOD, allow_asynchronous=False), waiting(GOOD, allow_asynchronous=False)) == ("", "")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"version": 120022, "version_text": "12.22"},
            "the server is PostgreSQL 12.22, 13 or newer needed: upgrade it",
        ),
        (
            {"may_create": False},
            "user gspo may not make a schema in it: GRANT CREATE ON DATABASE ... TO gspo, or make the schema and give it to "
            "this user",
        ),
        (
            {"sees_standbys": False},
            "user gspo may not see its standbys (pg_stat_replication), and nothing else shows that a commit is on a second "
            f"machine: GRANT pg_read_all_stats TO gspo{ALLOW}",
        ),
        (
            {"fsync": False},
            f"its fsync is off: a crash of its machine loses what it confirmed. Set fsync = on{ALLOW}",
        ),
        (
            {"full_page_writes": False},
            f"its full_page_writes is off: a crash of its machine loses what it confirmed. Set full_page_writes = on{ALLOW}",
        ),
        (
            {"standby_names": " "},
            "its synchronous_standby_names is empty: what it confirms is on its own disk alone, and a failover loses the "
            f"last commits. Set synchronous_standby_names = 'ANY 1 (*)' with a standby connected{ALLOW}",
        ),
    ],
)
def test_a_server_that_could_lose_what_it_confirmed_is_refused(changed: dict[str, object], text: str) -> None:
    facts = replace(GOOD, **changed)  # type: ignore[arg-type]
    assert refusal(facts, allow_asynchronous=False) == text
    assert refusal(facts, allow_asynchronous=True) == ("" if text.endswith(ALLOW) else text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"in_recovery": True},
            "the server is a standby (in recovery): name all servers in broker.database, with "
            "target_session_attrs=read-write, or promote it",
        ),
        (
            {"read_only": True},
            "the server is read-only (default_transaction_read_only): name all servers in broker.database, with "
            "target_session_attrs=read-write, or promote it",
        ),
    ],
)
def test_a_server_that_takes_no_commits_is_waited_for(changed: dict[str, object], text: str) -> None:
    facts = replace(GOOD, **changed)  # type: ignore[arg-type]
    assert waiting(facts, allow_asynchronous=True) == text


def test_a_server_without_its_standby_is_waited_for() -> None:
    facts = replace(GOOD, num_synchronous=0)
    assert waiting(facts, allow_asynchronous=False) == (
        "no synchronous standby is connected (synchronous_standby_names is 'ANY 1 (*)'): commits would wait for one. Start "
        "a standby of that name again"
    )
    assert waiting(facts, allow_asynchronous=True) == ""
