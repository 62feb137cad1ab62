"""docs/guide/security.md names the limits that the code has."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry

from gspo_protocol import limits
from gspo_protocol.channels import BATCH, PEER_WEIGHTS, WEIGHTS, WORK
from gspo_services.broker.quotas import PLACES, QUOTAS, SHUT_OUT_S, SLOWED_RETRY_S, STATUS_WEIGHT, OffenceReason
from gspo_services.shared.net.authenticator import AUTHENTICATOR_REASONS, HANDSHAKE_LIMIT_MS, RELOAD_S
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import MAX_CONNECTIONS, SILENT_S, Health, TelemetryServer
from gspo_services.shared.settings.sections import SecuritySection
from gspo_services.tasks.reward_worker.isolation import KEPT_VARIABLES
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
        f"| sessions of rollouts; of one key | {PLACES['rollout'].total:,}; {PLACES['rollout'].per_key:,} |",
        f"was silent longest ({PLACES['rollout'].silent_s:g} s) goes",
        f"| sessions of operators; of one key | {PLACES['operator'].total}; {PLACES['operator'].per_key} |",
        f"it gets one lease in {SLOWED_RETRY_S:g} s",
        f"is shut out for {SHUT_OUT_S:g} s",
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
    assert row in " ".join(TEXT.split())


def test_the_page_names_every_channel_and_the_roles_that_may_connect_to_it() -> None:
    text = " ".join(TEXT.split())
    assert BATCH.connects == ("learner", "operator")
    assert WORK.connects == PEER_WEIGHTS.connects == ("rollout",)
    assert WEIGHTS.connects == ("rollout", "learner")
    channels = "work and peer-weights take rollouts, batch takes learners and operators, weights takes rollouts and learners"
    assert channels in text


def test_the_page_has_the_number_of_planted_bugs() -> None:
    assert len(BUGS) == 19
    assert "plant nineteen bugs" in TEXT


def test_the_page_has_the_number_of_variables_that_reward_code_sees() -> None:
    assert len(KEPT_VARIABLES) == 11
    assert "environment of eleven harmless variables" in " ".join(TEXT.split())


@pytest.mark.parametrize("reason", QUOTAS)
def test_the_page_has_the_quotas_of_the_code(reason: OffenceReason) -> None:
    quota = QUOTAS[reason]
    (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| {reason}: ")]
    _, what, slowed, forgiven, shut_out, _ = [cell.strip() for cell in row.split("|")]
    assert slowed == f"{quota.slowed:,}"
    assert shut_out.partition("[")[0] == ("never" if math.isinf(quota.shut_out) else f"{quota.shut_out:,}")
    assert forgiven.split()[0] == f"{quota.forgiven_per_s * (1 if 'second' in forgiven else 60):g}"
    assert (f"and {quota.forgiven_per_finish:g} for each finished" in forgiven) == bool(quota.forgiven_per_finish)
    assert reason != "messages" or f"counts {STATUS_WEIGHT} times" in what
    assert quota.key_share == (1 if reason == "refused" else 32)


PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
UNPICKLE = {"torch.save", "torch.load", "send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object"}


def pickling(source: str) -> Iterator[str]:
    """What in a module writes pickles or reads them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and (ast.unparse(node) in UNPICKLE or node.attr in UNPICKLE):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"


def test_nothing_is_pickled() -> None:
    root = Path(__file__).parents[3]
    modules = [path for package in ("services", "protocol", "gspo") for path in sorted((root / package).rglob("*.py"))]
    assert len(modules) > 300
    assert [(str(path), found) for path in modules for found in pickling(path.read_text())] == []
    planted = "import pickle\nimport numpy as np\ntorch.load(x)\nnp.load(x, allow_pickle=True)\nsocket.send_pyobj(x)"
    assert sorted(pickling(planted)) == ["allow_pickle", "pickle", "socket.send_pyobj", "torch.load"]


def test_metrics_are_served_on_loopback_unless_a_setting_says_otherwise() -> None:
    assert SecuritySection().metrics_host == "127.0.0.1"
    server = TelemetryServer(SecuritySection().metrics_host, 0, CollectorRegistry(), Health(MonotonicClock(), 60.0))
    with server:
        here = psutil.Process().net_connections("tcp")
        assert {each.laddr.ip for each in here if each.laddr.port == server.port and each.status == "LISTEN"} == {
            "127.0.0.1"
        }
