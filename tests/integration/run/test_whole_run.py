"""The whole system once: ``gspo run`` with keys, real SGLang, a learner of two ranks, pages, report, export."""

import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_services.prepare.tiny_models.tiny import make_tiny_model
from gspo_services.rollout.sglang.server_process import load_files
from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY, RunProcess
from tests.support.runs.replayed import assert_replayed_bit_for_bit
from tests.support.wire.keys import counted, make_keys, secrets_in

pytestmark = pytest.mark.timeout(1800)


def fetch(port: int, path: str) -> tuple[int, str]:
    """Status and body of one of a process's pages."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(port: int) -> dict[str, float]:
    """All samples of /metrics by name, summed over their labels."""
    values: dict[str, float] = {}
    status, page = fetch(port, "/metrics")
    assert status == 200, page
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def test_a_run_with_two_learner_ranks_trains_evaluates_reports_and_exports(tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "run"
    make_tiny_model(model, num_steps=3, num_eval_episodes=1, progress=lambda _: None)
    keys = make_keys(tmp_path / "keys")
    with RunProcess(
        REPOSITORY / "examples/calculator.toml",
        directory,
        f"model.path={model}",
        "run.num_batches=4",
        "rollout.num_servers=1",
        "learner.num_ranks=2",
        "batch.groups_per_batch=4",
        "batch.group_size=4",
        "evaluation.num_tasks=8",
        "evaluation.every_batches=2",
        "reward.group=tests.support.reward_functions:beside",
        "learner.checkpoint_every_batches=2",
        "objective.routing_replay=true",
        "objective.routing_replay_from=engine",
        f"security.keys={keys}",
    ) as run:
        run.wait_until("first batch", lambda: len(run.rows("batch")) >= 1, 600)
        for name, port in run.metrics_ports.items():
            assert fetch(port, "/healthz") == (200, "alive\n"), name
            assert fetch(port, "/readyz") == (200, "ready\n"), name
            assert fetch(port, "/nothing")[0] == 404
        assert samples(run.metrics_ports["broker"])["gspo_broker_chunks_total"] > 0
        assert samples(run.metrics_ports["broker"])["gspo_broker_expert_bytes_total"] > 0
        assert samples(run.metrics_ports["learner"])["gspo_learner_batches_total"] >= 1
        rollout = samples(run.metrics_ports["rollout-0"])
        assert rollout["gspo_rollout_policy_version"] >= 1
        assert rollout["gspo_rollout_tokens_total"] > 0
        assert rollout["gspo_rollout_engine_metrics_up"] == 1
        assert rollout["sglang:generation_tokens_total"] > 0
        pages = [fetch(port, "/metrics")[1] for port in run.metrics_ports.values()]
        for server, clients in (("broker", 3), ("learner", 1)):  # a rollout, the learner, ``gspo run``; the rollout
            (page,) = [page for page in pages if f"gspo_{server}_connections_total" in page]
            assert counted(page, f"gspo_{server}_connections_total", outcome="admitted") >= clients
            # Not "handshake": that also counts a connection that is given up while it is being made.
            for reason in ("unknown_key", "wrong_role", "impostor", "bad_messages"):
                assert counted(page, f"gspo_{server}_refused_connections_total", reason=reason) == 0
        in_memory = load_files(child.pid for child in psutil.Process(run.process.pid).children(recursive=True))
        assert len(in_memory) == 1
        assert run.wait_finished(900) == 0, run.tail()
        assert run.leftovers() == []
        assert not any(path.exists() for path in in_memory)
    report = audit(directory)
    assert report.problems == []
    assert (report.num_batches, report.num_trained_trajectories, report.dropped) == (4, 4 * 4 * 4, {})
    assert [row["batch"] for row in run.rows("eval")] == [0, 2, 4]
    assert_replayed_bit_for_bit(directory, tmp_path / "again")
    assert [row["train/reward"] for row in run.rows("batch")] == [
        pytest.approx(row["train/reward/alone"] + row["train/reward/shorter"]) for row in run.rows("batch")
    ]
    assert any(row["train/reward/shorter"] > 0 for row in run.rows("batch")), "each group's answers were compared"
    for row in run.rows("batch"):
        assert row["optimizer_steps"] == 4
        assert row["lag/max"] <= 2
        # The engine's log-probs equal the learner's, up to float32 rounding, wherever both have the same version. Where an
        # answer has tokens of older versions too, these are replayed with their own experts, and the engine has computed
        # them again with those of the new weights.
        assert row["mismatch_sigma"] < (2e-5 if row["lag/max"] == 0 else 2e-3), row
        assert row.get("experts_differ/lag_0", 0.0) == 0, row
        assert row["experts_replayed/all"] > 0.9
    written = [*pages, run.output.read_text(), (directory / "settings.json").read_text()]
    written += [path.read_text(errors="replace") for path in (directory / "logs").iterdir()]
    assert not [secret for secret in secrets_in(keys) for text in written if secret in text], "a secret key was written"
    assert (directory / "plot.png").stat().st_size > 10_000
    exported = AutoModelForCausalLM.from_pretrained(directory / "export")
    assert exported.config.model_type == "qwen3_moe"
    assert AutoTokenizer.from_pretrained(directory / "export").eos_token == "<|end|>"
