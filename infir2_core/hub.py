"""The Hugging Face hub through its own library: snapshots, uploads, and what its failures mean to a person.

HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and proxies are the library's business and honoured by it; no token is
read, printed or stored here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights, index, configs and tokenizer; not the pickled or GGUF copies some repositories carry.
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")


@contextmanager
def explained(hub_id: str, where: str, missing: str = "") -> Iterator[None]:
    """Turns the library's exceptions into ours.

    Args:
        hub_id: repository, as shown.
        where: flag or argument that named it.
        missing: begins the sentence when there is no such repository or no connection.

    Raises:
        InputError: no such repository, no right to it, an agreement that is asked for, or a hub that cannot be reached.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    begin = f"{missing} " if missing else ""
    try:
        yield
    except GatedRepoError as error:
        hint = "accept its terms on the hub, then: hf auth login"
        raise InputError(f"the hub model '{hub_id}' asks for an agreement", where, hint) from error
    except LocalTokenNotFoundError as error:
        raise InputError(f"the hub wants to know who you are for '{hub_id}'", where, "hf auth login") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        hint = "check the spelling; a private model needs: hf auth login"
        raise InputError(f"{begin}no such model on the hub", where, hint) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        hint = "unset HF_HUB_OFFLINE or go online, or copy the model here and give its folder"
        raise InputError(f"{begin}the hub cannot be reached: {_reason(error)}", where, hint) from error
    except HfHubHTTPError as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code in (401, 403):
            hint = "hf auth login, with a token that may do this"
            raise InputError(f"the hub refuses access to '{hub_id}' ({code})", where, hint) from error
        raise InputError(f"{begin}the hub cannot be reached: {_reason(error)}", where, "try again later") from error
    except Exception as error:
        transport = type(error).__module__.split(".")[0] in ("httpx", "httpcore")  # what the library talks through
        if not (transport or isinstance(error, OSError)) or isinstance(error, InputError):
            raise
        hint = "go online, or copy the model here and give its folder"
        raise InputError(f"{begin}the hub cannot be reached: {_reason(error)}", where, hint) from error


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def snapshot(hub_id: str, where: str, patterns: Sequence[str] = MODEL_FILES, **options: Any) -> Path:
    """Folder of the cache with the files of a hub model that match `patterns`; what is there is not fetched again.

    Ask for config.json alone before the rest, so that a model of the wrong kind costs no gigabytes.

    Args:
        patterns: globs of files; empty: all of them.
        options: for `huggingface_hub.snapshot_download`, such as `revision`.

    Raises:
        InputError: as `explained`, or the repository has no config.json.
    """
    from huggingface_hub import snapshot_download

    with explained(hub_id, where, f"no folder '{hub_id}' here, and"):
        folder = Path(snapshot_download(hub_id, allow_patterns=list(patterns) or None, **options))
        if not (folder / "config.json").is_file():
            raise InputError(f"the hub model '{hub_id}' has no config.json", where, "choose a transformers model")
        return folder


def pull(hub_id: str, out: Path | None, revision: str | None) -> Path:
    """Downloads every file of a model that a loader needs, into `out` or the cache; a broken download is continued.

    Raises:
        InputError: as `snapshot`.
    """
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if out is not None:
        options["local_dir"] = out
    patterns = (*MODEL_FILES, "*.md", "*.model", "LICENSE*", "NOTICE*")
    return snapshot(hub_id, "HUB_ID", patterns, **options)


def push(folder: Path, hub_id: str, private: bool, revision: str | None, pull_request: bool, message: str) -> str:
    """Uploads a folder and returns the address of the commit (or of the pull request); files that the hub has already
    are not sent again, so a broken upload is continued by the same call.

    Args:
        private: for a repository that does not exist yet.
        revision: branch; None: main.
        pull_request: propose the change instead of committing it.

    Raises:
        InputError: no token, no right to write there, or a hub that cannot be reached.
    """
    from huggingface_hub import HfApi

    from . import __version__

    api = HfApi(library_name="infir2", library_version=__version__)
    with explained(hub_id, "HUB_ID"):
        if not pull_request:
            api.create_repo(hub_id, private=private, exist_ok=True)
        info = api.upload_folder(
            repo_id=hub_id,
            folder_path=folder,
            revision=revision,
            create_pr=pull_request,
            commit_message=message,
            ignore_patterns=[".*", "**/.*", "*.part"],
        )
    return str(info.pr_url or info.commit_url)
