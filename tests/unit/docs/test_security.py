"""docs/guide/security.md names the limits that the code has."""

from pathlib import Path

import pytest

from protocol import limits
from protocol.channels import BATCH, PEER_WEIGHTS, WEIGHTS, WORK
from services.reward_worker.isolation import KEPT_VARIABLES
from services.runtime.net.authenticator import AUTHENTICATOR_REASONS, HANDSHAKE_LIMIT_MS, RELOAD_S
from services.runtime.telemetry import MAX_CONNECTIONS, SILENT_S
from tests.fuzz.bugs import BUGS

TEXT = (Path(__file__).parents[3] / "docs" / "guide" / "security.md").read_text()
MIB = 1024 * 1024


@pytest.mark.parametrize(
    "row",
    [
        f"| {WORK.max_frame_bytes_in // 10**6} MB, {BATCH.max_frame_bytes_in // MIB} MiB |",
        f"| frame to the learner (weights) | {WEIGHTS.max_frame_bytes_in // MIB} MiB |",
        f"| frame to a rollout that shares weights (peer-weights) | {PEER_WEIGHTS.max_frame_bytes_in // MIB} MiB |",
        f"| frame to a client | {limits.MAX_FRAME_BYTES // MIB} MiB |",
        f"| {limits.MAX_HEADER_BYTES // MIB} MiB; {limits.MAX_LARGE_HEADER_BYTES // MIB} MiB |",
        f"| {limits.MAX_FRAMES}, {limits.MAX_MESSAGE_BYTES // MIB} MiB |",
        f"| {WORK.window} work, {BATCH.window} batch and weights |",
        f"| {limits.MAX_QUEUED:,} messages, {limits.MAX_QUEUED_BYTES // MIB} MiB |",
        f"| {WORK.window + limits.MAX_UNSEQUENCED} work, {BATCH.window + limits.MAX_UNSEQUENCED} batch; "
        f"{WORK.max_waiting_bytes // 10**6} MB, {BATCH.max_waiting_bytes // MIB} MiB |",
        f"| {limits.WINDOW_BYTES // MIB} MiB of unacknowledged messages |",
        f"| sessions | {limits.MAX_PEERS:,} |",
        f"| open leases of one rollout | {limits.MAX_LEASES_PER_PEER:,} |",
        f"| {limits.BAD_MESSAGES_BURST}, and {limits.BAD_MESSAGES_PER_S:g} more each second |",
        f"ignored for {limits.IGNORED_S:g} s",
        f"| {HANDSHAKE_LIMIT_MS // 1000} s | disconnected |",
        f"| {MAX_CONNECTIONS}, {SILENT_S:g} s |",
        f"look at the directory every {RELOAD_S:g} s",
        *AUTHENTICATOR_REASONS,
    ],
)
def test_the_page_has_the_limit_of_the_code(row: str) -> None:
    assert row in TEXT


def test_the_page_names_every_channel_and_the_roles_that_may_connect_to_it() -> None:
    text = " ".join(TEXT.split())
    assert BATCH.connects == ("learner", "operator")
    assert WORK.connects == WEIGHTS.connects == PEER_WEIGHTS.connects == ("rollout",)
    assert "work takes rollouts, batch takes learners and operators, weights and peer-weights take rollouts" in text


def test_the_page_has_the_number_of_planted_bugs() -> None:
    assert len(BUGS) == 15
    assert "plant fifteen bugs" in TEXT


def test_the_page_has_the_number_of_variables_that_reward_code_sees() -> None:
    assert len(KEPT_VARIABLES) == 10
    assert "environment of ten harmless variables" in " ".join(TEXT.split())
