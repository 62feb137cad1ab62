"""Models and data sets by their names on the Hugging Face hub: ``hf://Qwen/Qwen3-0.6B``, ``hf://datasets/openai/gsm8k/main``.

The package huggingface_hub fetches them into its cache, and its own variables hold: HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. What is in the cache is used where the hub cannot be reached.
"""

import os
import re
from typing import Final, NamedTuple
from urllib.parse import unquote

from gspo_services.shared.runtime.errors import ConfigurationError

SCHEME: Final = "hf://"
FETCHED: Final = "GSPO_HUB_FETCHED"
"""Set in the processes of a run whose command has fetched everything: they take the same revision, from the cache."""
OF_A_MODEL: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a model: weights as safetensors only."""
_NAME = re.compile(
    r"hf://(?P<data>datasets/)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^/]+))?(/(?P<inside>.+))?"
)


class HubName(NamedTuple):
    """What a name says."""

    is_data: bool
    repo: str
    revision: str | None
    inside: str
    """A file or folder of a data set; empty: all of it."""

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{'datasets/' * self.is_data}{self.repo}"

    @property
    def command(self) -> str:
        """What fetches it by hand."""
        kind = "--repo-type dataset " if self.is_data else ""
        revision = "" if self.revision is None else f"--revision {self.revision} "
        return f"hf download {self.repo} {kind}{revision}--local-dir {self.repo.partition('/')[2]}"


def hub_name(text: str) -> HubName:
    """Read a name that begins with ``hf://``. Raises: ConfigurationError."""
    found = _NAME.fullmatch(text)
    inside = "" if found is None else (found["inside"] or "").strip("/")
    if found is None or ".." in inside.split("/") or (inside and not found["data"]):
        raise ConfigurationError(
            f"{text[:200]!r}: expected hf://OWNER/MODEL, hf://datasets/OWNER/NAME, or hf://datasets/OWNER/NAME/FOLDER; "
            "@REVISION may follow the name"
        )
    return HubName(bool(found["data"]), found["repo"], unquote(found["revision"]) if found["revision"] else None, inside)


def local_path(text: str, *, fetch: bool) -> str:
    """Return the path of what a name means, in the cache of the hub. ``fetch``: bring what is not there, with its progress.

    Returns ``text`` itself where it is not there and not to be fetched. Raises: ConfigurationError, with the way out.
    """
    name = hub_name(text)
    try:
        from httpx import HTTPError
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigurationError(f"{text}: pip install huggingface_hub fetches it ({error})") from error
    patterns = list(OF_A_MODEL)
    if name.is_data:
        patterns = [name.inside, f"{name.inside}/*"] if name.inside else ["*"]
    is_local = not fetch or os.environ.get(FETCHED) == "1"
    try:
        folder = snapshot_download(
            name.repo, repo_type="dataset" if name.is_data else "model", revision=name.revision, allow_patterns=patterns,
            local_files_only=is_local,
        )  # fmt: skip
    except LocalEntryNotFoundError as error:
        if is_local:
            return text
        raise ConfigurationError(
            f"{text} is not, or not wholly, in the cache of this machine, and the hub cannot be reached: "
            f"{_first_line(error.__cause__ or error)}. Where it can: `{name.command}`; then name the folder"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigurationError(f"{text}: {_refused(name, error)}") from error
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"{text} cannot be fetched: {_first_line(error)}; the same command goes on where this one stopped"
        ) from error
    return os.path.join(folder, name.inside) if name.inside else folder


def _refused(name: HubName, error: Exception) -> str:
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    token = "HF_TOKEN is not set, and nobody is logged in" if get_token() is None else "with the token that is set"
    if isinstance(error, GatedRepoError):
        return f"its owners ask for an agreement: accept it at {name.page}, and set HF_TOKEN or `hf auth login` ({token})"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {name.revision or 'main'}: {name.page} lists them"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such {'data set' if name.is_data else 'model'}, or does not show it to you ({token})"
    return f"the hub refuses: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:300]
