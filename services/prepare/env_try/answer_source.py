"""Where the answers come from: a model here, a server, or no model at all."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from gspo_services.prepare.env_try.prompts import Prompts
from gspo_services.prepare.env_try.scripted import TextEngine, TypedAnswers, echo, fixed
from gspo_services.rollout.sglang import Engine, EngineError
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import PolicyEngine
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import Settings

MOST_BYTES: Final = 4 * 2**30
"""Weights that are loaded here without being asked for by name."""


@dataclass(frozen=True, kw_only=True)
class AnswerSource:
    """What answers."""

    kind: Literal["model", "server", "echo", "fixed", "typed"]
    url: str = ""
    """Of a server."""
    text: str = ""
    """Of fixed answers."""
    is_chosen: bool = True
    """Somebody has asked for it; otherwise it is what comes without an option."""

    @property
    def has_logprobs(self) -> bool:
        """Whether answers are drawn from a distribution."""
        return self.kind in ("model", "server")


@asynccontextmanager
async def open_engine(
    source: AnswerSource, settings: Settings, tokenizer: ChatTokenizer, prompts: Prompts, tell: Callable[[str], None]
) -> AsyncIterator[PolicyEngine]:
    """The engine that answers. ``tell`` shows a person what is remarkable, or to be typed next.

    Raises: ConfigurationError that says what is missing and the way out.
    """
    match source.kind:
        case "model":
            yield _model(settings, is_chosen=source.is_chosen)
        case "server":
            async with AsyncExitStack() as stack:
                # Small pieces, because an agent's stop string may end the answer at any token.
                engine = Engine(source.url, vocab_size=tokenizer.vocab_size, chunk_tokens=1)
                try:
                    await stack.enter_async_context(engine)
                    await _check_server(engine, settings.model.path, tell)
                except EngineError as error:
                    raise ConfigurationError(f"--url {source.url}: no SGLang server answers there: {error}") from error
                yield engine
        case "echo":
            yield TextEngine(tokenizer, prompts, echo)
        case "fixed":
            yield TextEngine(tokenizer, prompts, fixed(source.text))
        case "typed":
            ask = tell if sys.stdin.isatty() else _nobody
            yield TextEngine(tokenizer, prompts, TypedAnswers(sys.stdin.fileno(), ask).answer)


def _nobody(text: str) -> None:
    """Lines that come from a file need no request."""


async def _check_server(engine: Engine, directory: Path, tell: Callable[[str], None]) -> None:
    """Raises: ConfigurationError for a server whose answers could not be read; EngineError."""
    if await engine.weight_version() is None:
        raise ConfigurationError(f"--url {engine.url}: start this server with --weight-version 1: its version is no number")
    served = (await engine.server_info()).model_path
    if _name(Path(served)) != _name(directory):
        tell(f"note: the server serves {one_line(served)}, and the tokenizer is that of {directory}\n")


def _name(directory: Path) -> str:
    return directory.absolute().name


def _model(settings: Settings, *, is_chosen: bool) -> PolicyEngine:
    directory = settings.model.path
    num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if not num_bytes:
        raise ConfigurationError(
            f"{directory} has no weights (*.safetensors; pickles are not read): give another directory with --model, a "
            "server with --url, or --echo, which needs none"
        )
    if num_bytes > MOST_BYTES and not is_chosen:
        raise ConfigurationError(
            f"model.path is {directory}, with {num_bytes / 2**30:.0f} GiB of weights: --model {directory} loads it here "
            "nevertheless, --url asks a running server, and --echo needs no model"
        )
    try:
        from gspo_services.prepare.env_try.torch_engine import TorchEngine
    except ImportError as error:
        raise ConfigurationError(
            f"a model in this process needs torch and transformers ({error}): install the extra `learner`, or use --url or "
            "--echo"
        ) from error
    try:
        return TorchEngine(directory, settings.model.dtype)
    # transformers fails in many ways on files that are not a model's.
    except Exception as error:
        raise ConfigurationError(f"{directory} cannot be loaded: {type(error).__name__}: {error}") from error


def require_directory(directory: Path) -> None:
    """Raises: ConfigurationError when there is no model in ``directory``, of which the tokenizer is always needed."""
    if not (directory / "config.json").is_file():
        raise ConfigurationError(
            f"{directory} is no model directory: no config.json there. Its tokenizer and chat template are always needed: "
            "name it with --model, or set model.path. `gspo model tiny models/tiny` makes a small one"
        )
