"""A project in a folder, to be broken in one place: a whole model directory, rows, a reward function, run.toml."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.model_files.configuration import read_config
from gspo.model_files.text_model import TOWERS
from gspo_services.prepare.check.code import CodeReport
from gspo_services.prepare.check.command import all_findings
from gspo_services.prepare.check.findings import Finding
from gspo_services.prepare.check.situation import Situation, is_for_several_hosts
from gspo_services.prepare.check.worker import open_all
from gspo_services.shared.estimates import Hardware, device_named, shape_of
from gspo_services.shared.settings import load_configuration
from tests.support.checking.shapes import TINY

LAPTOP = Hardware(device=None, cores=4, memory_bytes=16 * 2.0**30)
REWARD = 'def grade(completion, task):\n    return {"right": float(task["answer"] in completion), "brief": 1.0}\n'


def gpus(name: str, number: int) -> Hardware:
    """As ``--gpu NAME --gpus N`` gives them."""
    return Hardware(device=device_named(name), num_devices=number, cores=16, is_named=True)


def write_weights(path: Path, elements: int, kind: str = "F32", *, name: str = "all") -> None:
    """A safetensors file with one tensor, whose name begins with ``name`` and whose bytes are a hole."""
    size = elements * {"F32": 4, "BF16": 2}[kind]
    header = json.dumps({f"{name}.{path.stem}": {"dtype": kind, "shape": [elements], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)


class Project:
    """Keys of a configuration that works, and the files that it names."""

    def __init__(self, folder: Path, chat_model: Path, module: str) -> None:
        """``chat_model``: a directory with a tokenizer; ``module``: a name that no other test has imported."""
        self.folder = folder
        self.model = folder / "model"
        self.module = module
        shutil.copytree(chat_model, self.model)
        self.vocabulary = json.loads((self.model / "config.json").read_text())["vocab_size"]
        self.configure_model()
        write_weights(self.model / "model.safetensors", 256_384 + 2 * 64 * (self.vocabulary - 264))
        rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(40)]
        self.write_rows("train.jsonl", rows[:32])
        self.write_rows("eval.jsonl", rows[32:])
        (folder / f"{module}.py").write_text(REWARD)
        self.keys: dict[str, Any] = {
            "run.directory": str(folder / "run"),
            "model.path": str(self.model),
            "environment.name": "dataset",
            "environment.options": {
                "train_path": str(folder / "train.jsonl"), "eval_path": str(folder / "eval.jsonl"), "answer_marker": "",
                "system_prompt": "", "reward": f"{module}:grade",
            },
            "sampling.max_turn_tokens": 8,
            "sampling.max_tokens": 64,
            "batch.groups_per_batch": 8,
            "learner.learning_rate": 2e-4,
            "evaluation.num_tasks": 8,
            # Any free port: whatever runs beside the tests is nobody's mistake.
            "broker.work_endpoint": f"ipc://{folder}/work", "broker.batch_endpoint": f"ipc://{folder}/batch",
            "learner.weights_endpoint": f"ipc://{folder}/weights",
            "broker.metrics_port": 0, "learner.metrics_port": 0, "rollout.metrics_port": 0, "rollout.max_total_tokens": 8192,
        }  # fmt: skip

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def configure_model(self, **changes: Any) -> None:
        """Replace config.json: the tiny model's with these changes, or another model's as a whole."""
        tiny = TINY | {"vocab_size": self.vocabulary, "eos_token_id": None}
        config = changes if "model_type" in changes else tiny | changes
        (self.model / "config.json").write_text(json.dumps(config))

    def configure_tower(self, kind: str, text: dict[str, Any], **others: Any) -> None:
        """Make it a checkpoint that also takes images, with the text model ``text``."""
        self.configure_model(model_type=kind, architectures=[TOWERS[kind].architecture], text_config=text, **others)
        elements = shape_of(read_config(self.model)).parameters
        write_weights(self.model / "model.safetensors", elements, name=next(iter(TOWERS[kind].names.values())) + "all")

    def option(self, **options: Any) -> None:
        """Change the environment's options."""
        self.keys["environment.options"] |= options

    @property
    def config(self) -> Path:
        """run.toml, written anew."""
        sections: dict[str, list[str]] = {}
        for key, value in self.keys.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, []).append(f"{name} = {_toml(value)}")
        path = self.folder / "run.toml"
        path.write_text("\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()))
        return path

    def situation(self, hardware: Hardware = LAPTOP, *, elsewhere: bool = False) -> Situation:
        """As the command makes it."""
        configuration = load_configuration(self.config, (), {})
        settings = configuration.settings
        return Situation(
            settings=settings,
            sources=configuration.sources,
            model_path=settings.model.path,
            hardware=hardware,
            elsewhere=elsewhere or is_for_several_hosts(settings),
            num_rollouts=settings.rollout.num_servers,
        )

    def findings(self, hardware: Hardware = LAPTOP, *, code: bool = True, elsewhere: bool = False) -> list[Finding]:
        """What ``gspo check`` finds. ``code``: open the user's code, in this process."""
        situation = self.situation(hardware, elsewhere=elsewhere)
        return all_findings(situation, (lambda: self._opened(situation)) if code else None)

    def _opened(self, situation: Situation) -> CodeReport:
        parts: list[Mapping[str, Any]] = []
        folder = self.folder / "opened"
        folder.mkdir()
        settings = situation.settings
        model = settings.model.model_copy(update={"path": situation.model_path})
        # As through the pipe: what cannot be said as JSON is noticed.
        open_all(
            settings.model_copy(update={"model": model}), folder, lambda part: parts.append(json.loads(json.dumps(part)))
        )
        return CodeReport(parts=parts)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
