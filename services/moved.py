"""Where modules of ``services`` have gone: the import of an old name fails with the new one."""

from collections.abc import Iterator
from typing import Final

_PACKAGE: Final = __name__.rpartition(".")[0]

_ROOMS: Final = (
    # from, to, and the modules that kept their names
    ("", "runs", "audit replay"),
    ("broker", "broker.ledger", "actions admission evaluations fleet state status training"),
    ("broker", "broker.store", "payload reader schema"),
    ("cli", "cli.doctor", "diagnosis observe"),
    ("cli", "cli.run", "display processes recording report supervisor"),
    ("environments", "reward_worker", "isolation"),
    ("learner", "learner.broker", "batches"),
    ("learner", "learner.checkpoints", "canary saving state_copy state_files"),
    ("learner", "learner.engine", "expert_parallel gradients optimizer_state process_group step"),
    ("learner", "learner.profiling", "flops profile"),
    ("learner", "learner.start", "engine_settings parallelism ranks"),
    ("learner", "learner.weights", "delta fan_out snapshot"),
    ("learner", "models", "tiny"),
    ("learner", "runtime", "durable"),
    ("rollout", "rollout.sglang", "generation server tether watch"),
    ("rollout", "rollout.weights", "sync verify"),
    ("runtime", "runtime.net", "channel peer security"),
    ("runtime", "runtime.settings", "arguments configuration exposure fingerprint run_settings"),
    ("runtime", "runtime.settings.sections", "objective"),
    ("runtime", "weights", "checksums compression engine_parameters"),
)

_RENAMED: Final = {
    "broker.batches": "broker.ledger.batch_order",
    "broker.delivery": "broker.outgoing",
    "broker.groups": "broker.ledger.group_states",
    "broker.peers": "broker.ledger.fencing",
    "broker.reception": "broker.sessions",
    "broker.record": "broker.metrics_file",
    "broker.records": "broker.rows",
    "broker.tasks": "broker.ledger.sampling.task_order",
    "broker.ledger.token_versions": "broker.ledger.intake",
    "broker.tokens": "broker.ledger.intake",
    "broker.work": "broker.ledger.leases",
    "cli.record": "cli.run.metrics_reader",
    "environments.math_reward": "reward_worker.mathematics",
    "environments.reward_worker": "reward_worker.worker",
    "learner.checkpoint": "learner.checkpoints.format",
    "learner.conversation": "learner.broker.loop",
    "learner.link": "learner.broker.client",
    "learner.profile_report": "learner.profiling.report",
    "learner.tiny_command": "models.command",
    "learner.weight_server": "learner.weights.server",
    "rollout.engine": "rollout.sglang.client",
    "rollout.engine_answers": "rollout.sglang.answers",
    "rollout.engine_http": "rollout.sglang.http",
    "rollout.engine_metrics": "rollout.sglang.metrics",
    "rollout.held": "rollout.weights.replica",
    "rollout.neighbours": "rollout.weights.peers",
    "rollout.safetensors_file": "rollout.weights.file",
    "rollout.sse": "rollout.sglang.http",
    "rollout.tokens": "rollout.tokenizer",
    "rollout.weights_directory": "rollout.weights.directory",
    "runtime.gate": "runtime.net.authenticator",
    "runtime.weight_server": "weights.server",
}


def _moved() -> Iterator[tuple[str, str]]:
    for old, new, names in _ROOMS:
        for name in names.split():
            yield f"{old}.{name}".lstrip("."), f"{_PACKAGE}.{new}.{name}"
    for old, new in _RENAMED.items():
        yield old, f"{_PACKAGE}.{new}"
    yield "environments.base", "gspo.environments"


MOVED: Final = dict(_moved())
"""New name by the name inside ``services``."""
