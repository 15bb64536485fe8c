"""The Hugging Face hub, through `huggingface_hub`: its cache, its token, its settings. Failures become plain words."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tidemill.errors import ConfigError, ModelError
from tidemill.models.box.find import HUB_ID

# What a folder that can be trained consists of; weights in other forms, pictures and logs stay where they are.
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
DATA_FILES = ("*.jsonl", "*.json", "*.parquet", "*.arrow", "*.csv", "*.tsv", "*.txt")
TOKEN_REMEDY = "log in with `hf auth login`, or set HF_TOKEN"


def here(name: str) -> Path | None:
    """Find the model's folder in the hub's cache, if it is there whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision = _parts(name)
    try:
        found = snapshot_download(repo, revision=revision, allow_patterns=list(FILES), local_files_only=True)
    except (LocalEntryNotFoundError, ValueError):
        return None
    return Path(found)


def fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repo, revision = _parts(name)
    with _in_words(name, f"fetching {name}"):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(FILES)))


def data_here(name: str) -> Path | None:
    """Find a data set's folder in the hub's cache, if it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, revision = _parts(name)
    try:
        return Path(
            snapshot_download(
                repo, repo_type="dataset", revision=revision, allow_patterns=list(DATA_FILES), local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, ValueError):
        return None


def fetch_data(name: str) -> Path:
    """Return the folder of a data set of the hub, fetched where it is not in the hub's cache yet."""
    from huggingface_hub import snapshot_download

    repo, revision = _parts(name)
    with _in_words(name, f"fetching the data set {name}", "data.source"):
        return data_here(name) or Path(
            snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=list(DATA_FILES))
        )


@contextmanager
def folder_to_push(to: Path | None, repo: str | None) -> Iterator[Path]:
    """Give the folder to write before it goes to `repo`: `to`, or one that does not stay."""
    if repo is not None and HUB_ID.fullmatch(repo) is None:
        raise ConfigError(f"--push {repo} is no repository of the hub", "write org/name")
    if to is not None:
        yield to
        return
    if repo is None:
        raise ConfigError("export to where?", "--to FOLDER writes a folder, --push org/name uploads to the hub")
    with tempfile.TemporaryDirectory(prefix="tidemill-push-") as scratch:
        yield Path(scratch) / "model"


def push(folder: Path, repo: str, *, message: str, private: bool = False, api: Any = None) -> str:
    """Upload a folder to a repository of the hub, made if need be, and return its address. `api`: an `HfApi`."""
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi(library_name="tidemill")
    with _in_words(repo, f"pushing to {repo}"):
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message=message)
    return str(getattr(commit, "repo_url", None) or commit)


def _parts(name: str) -> tuple[str, str | None]:
    repo, _, revision = name.partition("@")
    return repo, revision or None


@contextmanager
def _in_words(name: str, doing: str, key: str = "model.path") -> Iterator[None]:
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except (OSError, httpx.HTTPError, errors.HFValidationError, errors.EntryNotFoundError) as error:
        raise _explained(name, doing, list(_causes(error)), key) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explained(name: str, doing: str, causes: list[BaseException], key: str) -> ModelError:
    """Name the cause that is known; huggingface_hub wraps a refusal in a file that was not found."""
    from huggingface_hub import errors

    repo, revision = _parts(name)

    def met(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if met(errors.GatedRepoError):
        return ModelError(
            f"{doing}: {repo} is gated: its owners let only those in who have agreed to their terms",
            f"agree on its page at the hub, then {TOKEN_REMEDY}",
        )
    if met(errors.RepositoryNotFoundError):
        return ModelError(
            f"{doing}: {repo} is neither a folder here nor a repository of the hub that you may see",
            f"look at its spelling; if it is private, {TOKEN_REMEDY}",
        )
    if met(errors.RevisionNotFoundError):
        return ModelError(f"{doing}: {repo} has no revision {revision}", f"{key}={repo} takes its newest")
    if met(errors.LocalTokenNotFoundError) or any(_status(cause) in (401, 403) for cause in causes):
        return ModelError(f"{doing}: the hub refuses: you have no right to it", TOKEN_REMEDY)
    if met(errors.HFValidationError):
        return ModelError(f"{doing}: {causes[0]}", "write org/name")
    how = " --repo-type dataset" if key == "data.source" else ""
    first = (str(causes[-1]).strip().splitlines() or [type(causes[-1]).__name__])[0][:200]
    return ModelError(
        f"{doing}: it is neither a folder here nor in the hub's cache, and the hub cannot be reached ({first})",
        f"where there is a network: `hf download {repo}{how} --local-dir FOLDER`, then copy FOLDER here and set "
        f"{key}=FOLDER; HF_ENDPOINT names a mirror",
    )


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
