"""The Hugging Face hub through its own library: snapshots, uploads, and what its failures mean to a person.

HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and proxies are the library's business and honoured by it; no token is
printed or stored here, and none is read but to see whether it could be sent.
"""

from __future__ import annotations

import json
import logging
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import gaierror
from typing import Any

from .errors import InputError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights, index, configs and tokenizer; not the pickled or GGUF copies some repositories carry.
NEEDED = ("*.json", "*.safetensors", "*.txt", "*.jinja")
# And what a copy of the model has to keep: card, licence, notices.
MODEL_FILES = (*NEEDED, "*.md", "*.model", "*.tiktoken", "LICEN[CS]E*", "NOTICE*")
IGNORED = [".*", "**/.*", "*.part"]  # never uploaded
# In a folder that `pull` fills: which model it is of. The library keeps its own notes there, and nothing uploads them.
_NOTES = Path(".cache", "huggingface")
_MARK = _NOTES / "infir2.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@contextmanager
def explained(hub_id: str, where: str, missing: str = "", revision: str | None = None) -> Iterator[None]:
    """Turns the library's exceptions into ours. Its own warnings, which show addresses with passwords, are held back.

    Args:
        hub_id: repository, as shown.
        where: flag or argument that named it.
        missing: begins the sentence when there is no such repository or no connection.
        revision: branch, tag or commit that was asked for; None: main.

    Raises:
        InputError: no such repository or revision, no right to it, an agreement that is asked for, a token that is
            none, or a hub that cannot be reached.
        OSError: of this machine, such as a full disk; as it came.
    """
    from huggingface_hub.errors import (
        FileMetadataError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    begin = f"{missing} " if missing else ""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with _sendable_token():
            yield
    except GatedRepoError as error:
        hint = "accept its terms on the hub, then: hf auth login"
        raise InputError(f"the hub model '{hub_id}' asks for an agreement", where, hint) from error
    except LocalTokenNotFoundError as error:
        raise InputError(f"the hub wants to know who you are for '{hub_id}'", where, "hf auth login") from error
    except RevisionNotFoundError as error:
        what = f"the hub model '{hub_id}' has no revision '{revision or 'main'}'"
        hint = "give a branch, tag or commit that it has, or leave --revision out for main"
        raise InputError(what, "--revision" if revision else where, hint) from error
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
        if transport or isinstance(error, ConnectionError | TimeoutError | gaierror | ssl.SSLError):
            hint = "go online, or copy the model here and give its folder"
            raise InputError(f"{begin}the hub cannot be reached: {_reason(error)}", where, hint) from error
        if isinstance(error, FileMetadataError) or (type(error) is OSError and error.errno is None):
            what = f"'{hub_id}' did not come from the hub as it should: {_reason(error)}"  # the library's own checks
            raise InputError(what, where, "type the same command again") from error
        raise
    finally:
        log.setLevel(level)


@contextmanager
def _sendable_token() -> Iterator[None]:
    """Explains what fails because the token cannot stand in a request: the library's own words show the token."""
    from huggingface_hub import constants, get_token

    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) or constants.HF_HUB_OFFLINE:
            raise
        try:
            sendable = re.fullmatch(r"[!-~]*", get_token() or "") is not None
        except UnicodeError:
            sendable = False
        if sendable:
            raise
        what = "the token for the hub has characters that no token has"
        where, hint = "HF_TOKEN, or else the file of hf auth login", "copy it again, then: hf auth login"
        raise InputError(what, where, hint) from None


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return without_password(text)


def without_password(text: str) -> str:
    """`text` with the user and password of every address taken out, as HF_ENDPOINT may carry them."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


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
    from huggingface_hub.errors import LocalEntryNotFoundError

    with explained(hub_id, where, f"no folder '{hub_id}' here, and", options.get("revision")):
        try:
            folder = Path(snapshot_download(hub_id, allow_patterns=list(patterns) or None, **options))
        except LocalEntryNotFoundError:
            if tuple(patterns) != MODEL_FILES:
                raise
            # No connection, and a cache that something else filled: it need not have the card.
            folder = Path(snapshot_download(hub_id, allow_patterns=list(NEEDED), **options))
        if not (folder / "config.json").is_file():
            raise InputError(f"the hub model '{hub_id}' has no config.json", where, "choose a transformers model")
        return folder


def pull(hub_id: str, out: Path | None, revision: str | None) -> Path:
    """Downloads every file of a model that a loader needs, into `out` or the cache; a broken download is continued.

    Raises:
        InputError: as `snapshot`, or `out` holds another model.
    """
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if out is not None:
        commit = _claim(out, hub_id, revision)  # the library takes any folder for the model when the hub says no
        if commit is None:
            return out
        options = {"revision": commit, "local_dir": out}
    return snapshot(hub_id, "HUB_ID", **options)


def hub_name(folder: Path) -> str:
    """The hub id of a folder of the hub's cache (models--OWNER--NAME/snapshots/REVISION), or of one that `pull` filled;
    empty for other folders."""
    match = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{folder.resolve()}/")
    return f"{match[1]}/{match[2]}" if match else str(_read_mark(folder).get("id") or "")


def _claim(out: Path, hub_id: str, revision: str | None) -> str | None:
    """Marks `out` as the folder of a model and returns the commit to fetch; None when offline and it is there already.

    Raises:
        InputError: as `explained`, or `out` holds something else.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RevisionNotFoundError

    mark = _read_mark(out)
    with explained(hub_id, "HUB_ID", revision=revision):
        if constants.HF_HUB_OFFLINE and mark.get("id") == hub_id and (out / "config.json").is_file():
            if (revision or "main") in (mark.get("revision"), mark.get("commit")):
                return None
        api = HfApi()
        commit = api.model_info(hub_id, revision=revision).sha or revision or "main"
        if mark and mark.get("id") != hub_id:
            raise _other(out, f"holds the model '{mark.get('id')}'")
        if not mark and out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir()):
            known = _commits(out)  # of a download by the library alone
            if not known:
                raise _other(out, "holds files that did not come from the hub")
            try:
                for one in known - {commit}:
                    api.model_info(hub_id, revision=one)
            except RevisionNotFoundError:
                raise _other(out, "holds another model") from None
    (out / _NOTES).mkdir(parents=True, exist_ok=True)
    content = {"id": hub_id, "revision": revision or "main", "commit": commit}
    (out / _MARK).write_text(json.dumps(content), encoding="utf-8")
    return commit


def _other(out: Path, what: str) -> InputError:
    return InputError(f"the folder {what}", f"OUT: {out}", "choose another folder, or remove this one")


def _read_mark(out: Path) -> dict[str, str]:
    try:
        content = json.loads((out / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _commits(out: Path) -> set[str]:
    """The commits that the library noted for the files of a folder."""
    notes = (out / _NOTES / "download").rglob("*.metadata")
    lines = {path.read_text(encoding="utf-8", errors="replace").split("\n")[0].strip() for path in notes}
    return {line for line in lines if _COMMIT.fullmatch(line)}


def files_to_push(folder: Path) -> list[Path]:
    """What `push` sends of a folder, relative to it.

    Raises:
        InputError: a link, of whatever name, leads out of the folder (or, in the hub's cache, out of the repository).
    """
    from huggingface_hub.utils import filter_repo_objects

    from .convert.folder import links_outside

    for what in links_outside(folder):
        raise InputError(what, str(folder), "remove it, or copy the file here")
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = set(filter_repo_objects((file.as_posix() for file in files), ignore_patterns=IGNORED))
    return [file for file in files if file.as_posix() in kept]


def push(folder: Path, hub_id: str, private: bool, revision: str | None, pull_request: bool, message: str) -> str:
    """Uploads a folder and returns the address of the commit (or of the pull request); files that the hub has already
    are not sent again, so a broken upload is continued by the same call.

    Args:
        private: for a repository that does not exist yet.
        revision: branch; None: main.
        pull_request: propose the change instead of committing it.

    Raises:
        InputError: no token, no right to write there, a hub that cannot be reached, or as `files_to_push`.
    """
    from huggingface_hub import HfApi

    from . import __version__

    files_to_push(folder)
    api = HfApi(library_name="infir2", library_version=__version__)
    with explained(hub_id, "HUB_ID", revision=revision):
        if not pull_request:
            api.create_repo(hub_id, private=private, exist_ok=True)
        info = api.upload_folder(
            repo_id=hub_id,
            folder_path=folder,
            revision=revision,
            create_pr=pull_request,
            commit_message=message,
            ignore_patterns=IGNORED,
        )
    return without_password(str(info.pr_url or info.commit_url))
