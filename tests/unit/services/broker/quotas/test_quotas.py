"""Who has used up a quota: slowed, shut out, forgiven; and whom that never touches."""

import pytest

from gspo_services.broker.quotas import (
    MAX_SLOWED_RETRY_S,
    QUOTAS,
    SHUT_OUT_S,
    SLOWED_RETRY_S,
    Change,
    OffenceReason,
    Quotas,
    Subject,
    subjects,
)

SHARED = ("rollout", "learner", "operator")
ONE = subjects("rollout-7", "rollout", SHARED)
WORK: tuple[OffenceReason, ...] = ("refused", "failed", "expired", "idle", "stale")


def offend(quotas: Quotas, reason: OffenceReason, number: int, now: float = 0.0) -> list[Change]:
    return [change for _ in range(number) for change in quotas.count(ONE, reason, now)]


def test_a_peers_own_key_answers_for_it_and_a_shared_key_does_not() -> None:
    assert subjects("rollout-7", "rollout", SHARED) == (Subject("rollout-7"),)
    assert subjects("rollout-7", "", SHARED) == (Subject("rollout-7"),)
    assert subjects("rollout-a-7", "rollout-a", SHARED) == (Subject("rollout-a-7"), Subject("rollout-a", is_key=True))


@pytest.mark.parametrize("reason", QUOTAS)
def test_a_peer_is_slowed_once_above_the_quota_and_forgiven_at_half_of_it(reason: OffenceReason) -> None:
    quotas, quota = Quotas(), QUOTAS[reason]
    assert offend(quotas, reason, int(quota.slowed)) == []
    (change,) = offend(quotas, reason, 2)
    assert (change.event, change.subject, change.fields["reason"]) == ("peer_slowed", ONE[0], reason)
    assert quotas.is_slowed(ONE) == (reason != "messages")
    assert quotas.num_limited() == {"slowed": 1, "shut_out": 0}
    almost = (quota.slowed / 2) / quota.forgiven_per_s
    assert quotas.forgive(almost) == []
    assert [change.event for change in quotas.forgive(almost + 3 / quota.forgiven_per_s)] == ["peer_forgiven"]
    assert not quotas.is_slowed(ONE)
    assert quotas.forgive(10 * almost) == []
    assert quotas.limited(10 * almost) == []


@pytest.mark.parametrize("reason", ["messages", "refused"])
def test_a_peer_that_goes_on_is_shut_out_for_a_while_and_then_only_slowed(reason: OffenceReason) -> None:
    quotas, quota = Quotas(), QUOTAS[reason]
    events = [change.event for change in offend(quotas, reason, 3 * int(quota.shut_out))]
    assert events == ["peer_slowed", "peer_shut_out"]
    assert quotas.shut_out_s(ONE, 0.0) == SHUT_OUT_S
    (limited,) = quotas.limited(10.0)
    assert (limited["peer"], limited["standing"], limited["seconds"]) == ("rollout-7", "shut_out", SHUT_OUT_S - 10)
    assert quotas.forgive(SHUT_OUT_S - 1) == []
    assert quotas.shut_out_s(ONE, SHUT_OUT_S) == 0
    quotas.forgive(SHUT_OUT_S)
    assert quotas.num_limited()["shut_out"] == 0
    *_, again = [change for _ in range(int(quota.shut_out) + 1) for change in quotas.count(ONE, reason, SHUT_OUT_S)]
    assert again.event == "peer_shut_out"
    later = SHUT_OUT_S + 2 * quota.shut_out / quota.forgiven_per_s
    assert [change.event for change in quotas.forgive(later)] == ["peer_forgiven"], "all is forgiven in the end"


@pytest.mark.parametrize("reason", ["failed", "expired", "stale"])
def test_bad_luck_slows_a_peer_and_never_shuts_it_out(reason: OffenceReason) -> None:
    quotas = Quotas()
    assert [change.event for change in offend(quotas, reason, 100_000)] == ["peer_slowed"]
    assert quotas.shut_out_s(ONE, 0.0) <= 0


def test_finished_work_weighs_against_faults() -> None:
    quotas = Quotas()
    offend(quotas, "expired", 300)
    assert quotas.is_slowed(ONE)
    for _ in range(100):
        quotas.finished(ONE, 0.0)
    quotas.forgive(0.0)
    assert not quotas.is_slowed(ONE)


def test_a_flood_is_ignored_above_the_rate_and_below_it_nothing_is() -> None:
    quotas, quota = Quotas(), QUOTAS["messages"]
    now = 0.0
    for _ in range(20_000):  # ten times what the busiest rollout asks for
        now += 1 / (0.9 * quota.forgiven_per_s)
        quotas.count(ONE, "messages", now)
        assert not quotas.ignores(ONE, now)
    answered = 0
    for _ in range(10_000):
        now += 1 / 100_000
        quotas.count(ONE, "messages", now)
        answered += not quotas.ignores(ONE, now)
    assert answered <= quota.slowed + 0.1 * quota.forgiven_per_s
    assert not quotas.is_slowed(ONE), "it may still work"


def test_a_slowed_peer_gets_a_lease_now_and_then() -> None:
    quotas = Quotas()
    assert quotas.may_lease(ONE, 0.0)
    assert not quotas.may_lease(ONE, SLOWED_RETRY_S - 1)
    assert quotas.may_lease(ONE, SLOWED_RETRY_S)


def test_a_slowed_peer_that_finishes_nothing_waits_twice_as_long_each_time() -> None:
    quotas, now = Quotas(), 0.0
    for times in range(10):
        assert quotas.may_lease(ONE, now)
        pause = min(SLOWED_RETRY_S * 2**times, MAX_SLOWED_RETRY_S)
        assert not quotas.may_lease(ONE, now + pause - 0.1)
        now += pause
    quotas.count(ONE, "expired", now)
    quotas.finished(ONE, now)
    assert quotas.may_lease(ONE, now)
    assert quotas.may_lease(ONE, now + SLOWED_RETRY_S)


def test_new_names_under_an_own_key_do_not_make_new_quotas() -> None:
    quotas = Quotas()
    slowed: list[Subject] = []
    for number in range(40):
        who = subjects(f"rollout-a-{number}", "rollout-a", SHARED)
        slowed += [change.subject for _ in range(2) for change in quotas.count(who, "refused", 0.0)]
    assert slowed == [Subject("rollout-a", is_key=True)]
    assert quotas.is_slowed(subjects("rollout-a-new", "rollout-a", SHARED))
    assert not quotas.is_slowed(subjects("rollout-b", "rollout-b", SHARED))
    (limited,) = quotas.limited(0.0)
    assert (limited["peer"], limited["per_minute"], limited["what"]) == ("the key rollout-a", 80, "refused messages")


def test_what_is_kept_and_shown_is_bounded() -> None:
    quotas = Quotas()
    for number in range(10_000):
        quotas.count((Subject(f"rollout-{number}"),), "refused", 0.0, 50)
    assert len(quotas._accounts) <= 8193
    assert len(quotas.limited(0.0)) == 64
    quotas.forgive(1e6)
    assert not quotas._accounts
