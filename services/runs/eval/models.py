"""The models that are scored: directories, and checkpoints of the configuration's run."""

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gspo.files import discard_directory
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from gspo_services.runs.audit import Checkpoint, read_checkpoints
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.shared.settings import Settings, several_brokers_in

ALL: Final = "all"
_SMALL: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """One model to score."""

    label: str
    """Its name in tables, files and plots."""
    identity: str
    """Digest of everything that its samples depend on."""
    directory: Path
    """The model's directory; for a checkpoint, the directory of its tokenizer and configuration."""
    checkpoint: Checkpoint | None = None
    run: Path | None = None
    """The checkpoint's run."""

    @property
    def folder(self) -> str:
        """The name of its results folder."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.label)


def scored_models(settings: Settings, directories: Sequence[Path], checkpoints: Sequence[str]) -> list[ScoredModel]:
    """List the models in the order in which they were named; none named: model.path. Raises: ConfigurationError."""
    paths = list(directories) or ([] if checkpoints else [settings.model.path])
    models = [_directory(path) for path in paths]
    models += [_checkpoint(settings, each) for each in _found(settings.run.directory, checkpoints)]
    for place, model in enumerate(models):
        for other in models[:place]:
            if other.identity == model.identity and other.directory == model.directory:
                raise ConfigurationError(f"{model.label} is named twice: name each model once")
    labels = [model.label for model in models]
    if len(set(labels)) == len(labels):
        return models
    # Two labels may be equal, such as a/export and b/export.
    return [_longer(model) if labels.count(model.label) > 1 else model for model in models]


def _longer(model: ScoredModel) -> ScoredModel:
    whole = str(model.directory.resolve()).strip("/")
    return ScoredModel(label=whole, identity=model.identity, directory=model.directory)


def _directory(path: Path) -> ScoredModel:
    if not path.is_dir():
        raise ConfigurationError(f"--model {path}: there is no such directory")
    _require_model(path, "--model names a Hugging Face model directory; `gspo export RUN` writes one from a checkpoint")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ConfigurationError(
            f"--model {path}: there are no weights (*.safetensors); pickles (*.bin, *.pt) are not read: `gspo check` says "
            "how to convert them"
        )
    stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in weights]
    digest = hashlib.blake2b(json.dumps(stats).encode(), digest_size=8)
    for name in _SMALL:
        if (path / name).is_file():
            digest.update(name.encode() + (path / name).read_bytes())
    return ScoredModel(label=path.resolve().name, identity=digest.hexdigest(), directory=path)


def _require_model(path: Path, way_out: str) -> None:
    """Raises: ConfigurationError for a directory without a model, or with a tokenizer that cannot be used."""
    if not (path / "config.json").is_file():
        raise ConfigurationError(f"{path}: there is no config.json: {way_out}")
    try:
        ChatTokenizer(path)
    except TokenizerError as error:
        raise ConfigurationError(f"{path} cannot be scored without its tokenizer: {error}") from error


def _found(run: Path, wanted: Sequence[str]) -> list[Checkpoint]:
    """Find the checkpoints after these numbers of batches; of two at one position, the one with the newer weights."""
    if not wanted:
        return []
    if not run.is_dir():
        raise ConfigurationError(f"--checkpoint: there is no run in {run} (run.directory); score a directory with --model")
    if reason := several_brokers_in(run):
        raise ConfigurationError(reason)
    by_batch = {each.batch_position: each for each in sorted(read_checkpoints(run), key=lambda each: each.policy_version)}
    there = ", ".join(str(batch) for batch in sorted(by_batch)) or "none"
    if list(wanted) == [ALL]:
        if not by_batch:
            raise ConfigurationError(f"--checkpoint all: {run} has no checkpoint yet")
        return [by_batch[batch] for batch in sorted(by_batch)]
    found = []
    for text in wanted:
        if not text.isdecimal() or int(text) not in by_batch:
            raise ConfigurationError(
                f"--checkpoint {text[:64]}: {run} has checkpoints after these batches: {there} (learner.keep_checkpoints "
                "sets how many are kept); name some of them, or `all`"
            )
        found.append(by_batch[int(text)])
    return found


def _checkpoint(settings: Settings, checkpoint: Checkpoint) -> ScoredModel:
    _require_model(
        settings.model.path, "it is model.path, and the run's checkpoints need its tokenizer; name its directory with --set"
    )
    metadata = settings.run.directory / "checkpoints" / checkpoint.name / "checkpoint.json"
    try:
        content = metadata.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{metadata}: cannot be read: {error.strerror}") from error
    return ScoredModel(
        label=f"batch {checkpoint.batch_position}",
        identity=hashlib.blake2b(content, digest_size=8).hexdigest(),
        directory=settings.model.path,
        checkpoint=checkpoint,
        run=settings.run.directory,
    )


@contextmanager
def served_directory(model: ScoredModel, work: Path) -> Iterator[Path]:
    """Yield a directory with the model's weights: its own, or a checkpoint's, exported below ``work`` meanwhile.

    Raises: ServiceError when the checkpoint cannot be exported.
    """
    if model.checkpoint is None:
        yield model.directory
        return
    exported = work / f"export-{model.folder}"
    if exported.exists():  # From an earlier process: it is complete, but perhaps of other weights.
        discard_directory(exported)
    work.mkdir(parents=True, exist_ok=True)
    words = [str(model.run), "--checkpoint", str(model.checkpoint.batch_position), "--to", str(exported)]
    command = module_command("gspo_services.runs.export", *words, "--model", str(model.directory))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceError(f"{model.label} cannot be exported: {(done.stderr.strip() or done.stdout.strip())[-2000:]}")
    try:
        yield exported
    finally:
        discard_directory(exported)
