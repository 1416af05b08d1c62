"""`infir2 hub` against a small server that speaks the hub's endpoints, through HF_ENDPOINT."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hf_models import write_model

Cli = Callable[..., Any]
SHA = "0123456789012345678901234567890123456789"
TOKEN = "hf_not_to_be_shown"


class Hub:
    """A hub with repositories in memory; remembers the requests and who made them."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.refuse = 0
        self.break_after: int | None = None  # bytes of a large file after which the connection ends
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def answer(self, code: int, body: bytes = b"", head: dict[str, str] | None = None) -> None:
                self.send_response(code)
                for key, value in {"Content-Length": str(len(body)), **(head or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def reply(self, value: Any) -> None:
                self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.split("?")[0].removeprefix("http://hub.invalid")  # asked as a proxy
                hub.asked.append((self.command, path, self.headers.get("Authorization", "")))
                if hub.refuse and self.command == "POST":
                    return self.answer(hub.refuse, b"{}")
                parts = path.strip("/").split("/")
                if path == "/api/repos/create":
                    content = json.loads(body)
                    name = (
                        f"{content['organization']}/{content['name']}" if "organization" in content else content["name"]
                    )
                    hub.repos.setdefault(name, {})
                    return self.reply({"url": f"{hub.url}/{name}", "name": name})
                if path == "/api/validate-yaml":
                    return self.reply({"errors": [], "warnings": []})
                if parts[0] == "api":
                    return self.api("/".join(parts[2:4]), parts[4:], body)
                return self.file("/".join(parts[:2]), "/".join(parts[4:]))

            def api(self, name: str, rest: list[str], body: bytes) -> None:
                files = hub.repos.get(name)
                if files is None:
                    return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                if rest[:1] == ["preupload"]:
                    listed = json.loads(body)["files"]
                    return self.reply(
                        {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in listed]}
                    )
                if rest[:1] == ["commit"]:
                    for line in map(json.loads, body.splitlines()):
                        if line["key"] == "file":
                            files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    return self.reply({"commitUrl": f"{hub.url}/{name}/commit/{SHA}", "commitOid": SHA})
                if rest[:1] == ["tree"]:
                    listed = [{"type": "file", "path": p, "size": len(d), "oid": _oid(d)} for p, d in files.items()]
                    return self.reply(listed)
                if rest[:1] == ["revision"] and rest[1] not in ("main", "v1", SHA):
                    return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                siblings = [{"rfilename": path} for path in files]
                self.reply({"id": name, "sha": SHA, "siblings": siblings, "private": False, "tags": []})

            def file(self, name: str, path: str) -> None:
                data = hub.repos.get(name, {}).get(path)
                if data is None:
                    return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                head = {"X-Repo-Commit": SHA, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"}
                begin = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
                if (
                    self.command == "GET"
                    and hub.break_after is not None
                    and path.endswith(".safetensors")
                    and not begin
                ):
                    self.send_response(200)
                    for key, value in {"Content-Length": str(len(data)), **head}.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(data[: hub.break_after])
                    self.wfile.flush()
                    self.close_connection = True
                    return
                if begin:
                    head["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
                self.answer(206 if begin else 200, data[begin:], head)

            do_GET = do_HEAD = do_POST = do_PUT = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def online(hub: Hub, run_cli: Cli, tmp_path: Path) -> Cli:
    """The command with the little hub as HF_ENDPOINT and an empty HF_HOME."""
    environment = {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip

    def run(*words: object, **more: str) -> Any:
        done = run_cli(*words, cwd=tmp_path, env=environment | more, cold=words[1] == "push")
        assert TOKEN not in done.stdout + done.stderr
        return done

    return run


def held(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and ".cache" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_push_and_pull_give_the_same_files(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", shard="400KB")
    (tmp_path / "hf/pytorch_model.bin").unlink()
    done = online("hub", "push", "hf", "some/model", "--dry-run")
    assert done.returncode == 0 and "model-00001-of-" in done.stdout and hub.repos == {}
    done = online("hub", "push", "hf", "some/model", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["address"] == f"{hub.url}/some/model/commit/{SHA}"
    assert hub.repos["some/model"] == held(tmp_path / "hf")
    assert {who for method, _, who in hub.asked if method == "POST"} == {f"Bearer {TOKEN}"}
    done = online("hub", "pull", "some/model", "copy")
    assert done.returncode == 0 and Path(done.stdout.strip()) == tmp_path / "copy", done.stderr
    assert held(tmp_path / "copy") == held(tmp_path / "hf")
    assert TOKEN not in "".join(p.read_text("latin-1") for p in tmp_path.rglob("*") if p.is_file())


def test_a_hub_id_stands_wherever_a_folder_does(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    hub.repos["some/model"] = held(tmp_path / "hf")
    card = "---\nlicense: apache-2.0\nbase_model: Some/Base\n---\n# card\n"
    beside = {"README.md": card, "LICENSE": "all of it", "NOTICE.txt": "by them", "tokenizer.model": "pieces"}
    hub.repos["some/model"] |= {name: text.encode() for name, text in beside.items()}
    done = online("cast-fp8", "some/model", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model-fp8/model.safetensors").is_file() and not (tmp_path / "home/hub").is_file()
    assert {name: (tmp_path / "model-fp8" / name).read_text() for name in beside} == beside
    assert not (tmp_path / "model-fp8/pytorch_model.bin").exists()
    done = online("hub", "card", "model-fp8")
    for text in ("license: apache-2.0", "base_model: some/model", "base_model_relation: quantized"):
        assert text in done.stdout, text
    done = online("hub", "card", "some/model")
    assert done.returncode == 0 and "base_model: Some/Base" in done.stdout and "# card" in done.stdout, done.stderr
    done = online("hub", "card", "some/model", "--write")
    assert done.returncode == 2 and "a copy in the hub's cache" in done.stderr
    done = online("hub", "card", "some/other", HF_HUB_OFFLINE="1")
    assert done.returncode == 3 and "unset HF_HUB_OFFLINE" in done.stderr
    done = online("convert", "check", "some/model", "hf")
    assert done.returncode == 0, done.stderr
    asked = len(hub.asked)
    done = online("convert", "from-hf", "some/model", "native", HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and len(hub.asked) == asked, done.stderr  # from the cache
    (cached,) = (tmp_path / "home/hub/models--some--model/snapshots").iterdir()
    (cached / "README.md").unlink()  # as something else would have left the cache
    done = online("convert", "from-hf", "some/model", "native1", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    done = online("convert", "from-hf", "some/other", "native2", HF_HUB_OFFLINE="1")
    assert done.returncode == 3 and "unset HF_HUB_OFFLINE" in done.stderr


def test_hub_ids_where_folders_are_only_read_and_a_proxy(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    hub.repos["some/model"] = held(tmp_path / "hf")
    proxy = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.url, "NO_PROXY": ""}
    done = online("convert", "verify", "some/model", **proxy)
    assert done.returncode == 0 and "sound, bfloat16" in done.stdout, done.stderr
    assert online("convert", "from-hf", "hf", "native").returncode == 0
    done = online("convert", "to-hf", "native", "again", "--origin", "some/model", **proxy)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again/chat_template.jinja").read_text() == "{{ messages }}"
    assert "base_model: some/model" in (tmp_path / "again/README.md").read_text()


def test_a_broken_download_is_continued(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    hub.repos["some/model"] = held(tmp_path / "hf")
    hub.break_after = 300_000
    online("hub", "pull", "some/model", "copy")
    hub.break_after = None
    done = online("hub", "pull", "some/model", "copy")
    assert done.returncode == 0, done.stderr
    expected = held(tmp_path / "hf")
    expected.pop("pytorch_model.bin")
    assert held(tmp_path / "copy") == expected


def test_a_folder_is_of_the_model_that_is_asked_for(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    hub.repos["some/model"] = hub.repos["some/other"] = held(tmp_path / "hf")
    assert online("hub", "pull", "some/model", "copy").returncode == 0
    before = held(tmp_path / "copy")
    secret = hub.url.replace("://", "://user:pa55word@")
    down = "http://user:pa55word@127.0.0.1:9"
    for words, environment, expected in (
        (("wrong/id", "copy"), {}, "no such model on the hub"),
        (("wrong/id", "copy"), {"HF_ENDPOINT": secret}, "no such model on the hub"),
        (("wrong/id", "copy"), {"HF_ENDPOINT": down}, "the hub cannot be reached"),
        (("some/model", "copy"), {"HF_ENDPOINT": down}, "the hub cannot be reached"),
        (("some/other", "copy"), {}, "the folder holds the model 'some/model'"),
        (("some/other", "copy"), {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached"),
        (("some/model", "copy", "--revision", "v1"), {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached"),
        (("some/model", "hf"), {}, "did not come from the hub"),
    ):
        done = online("hub", "pull", *words, **environment)
        assert done.returncode == 3 and expected in done.stderr, done.stderr
        assert "pa55word" not in done.stdout + done.stderr, done.stderr
    assert held(tmp_path / "copy") == before
    assert online("hub", "pull", "some/model", "copy").returncode == 0
    asked = len(hub.asked)
    done = online("hub", "pull", "some/model", "copy", HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and len(hub.asked) == asked, done.stderr
    # A folder that the library filled by itself says only of which commit it is.
    (tmp_path / "copy/.cache/huggingface/infir2.json").unlink()
    assert online("hub", "pull", "some/model", "copy").returncode == 0
    (tmp_path / "copy/.cache/huggingface/infir2.json").unlink()
    for note in (tmp_path / "copy/.cache/huggingface/download").rglob("*.metadata"):
        note.write_text("\n".join(["f" * 40, *note.read_text().splitlines()[1:]]) + "\n")
    done = online("hub", "pull", "some/model", "copy")
    assert done.returncode == 3 and "the folder holds another model" in done.stderr


def test_a_revision_that_is_not_there_and_a_folder_that_cannot_be_written(
    online: Cli, hub: Hub, tmp_path: Path
) -> None:
    write_model(tmp_path / "hf", layers=1)
    hub.repos["some/model"] = held(tmp_path / "hf")
    for out in ([], ["copy"]):
        done = online("hub", "pull", "some/model", *out, "--revision", "v9")
        assert done.returncode == 3 and "'some/model' has no revision 'v9'" in done.stderr, done.stderr
        assert "--revision" in done.stderr and "no such model" not in done.stderr
    assert not (tmp_path / "copy").exists()
    assert online("hub", "pull", "some/model", "copy", "--revision", "v1").returncode == 0
    (tmp_path / "file").write_text("")
    done = online("hub", "pull", "some/model", "file/copy")
    assert done.returncode == 3 and "cannot be reached" not in done.stderr and "bug" not in done.stderr, done.stderr
    done = online("hub", "pull", "some/model", HF_HOME=str(tmp_path / "file/home"))
    assert done.returncode == 3 and "cannot be reached" not in done.stderr and "bug" not in done.stderr, done.stderr


def test_a_folder_that_fails_its_check_is_not_pushed(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    done = online("hub", "push", "hf", "some/model")
    assert done.returncode == 3 and "fails its check" in done.stderr and "truncated" in done.stderr
    assert hub.asked == []


def test_links_that_leave_the_folder_and_unfinished_files_are_not_pushed(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    (tmp_path / "secret").write_text("mine")
    for place in ("x.bin", "x.txt", "extra/x.safetensors", "x"):
        link = tmp_path / "hf" / place
        link.symlink_to(tmp_path if place == "x" else tmp_path / "secret")
        for words in ((), ("--dry-run",)):
            done = online("hub", "push", "hf", "some/model", *words)
            assert done.returncode == 3 and f"{place} is a link that leaves the folder" in done.stderr, done.stderr
        link.unlink()
    assert hub.asked == []
    (tmp_path / "hf/copy.md").symlink_to("README.md")  # stays inside
    for name in ("model.safetensors.part", ".cache/huggingface/note.json", "extra/.hidden/file.txt"):
        (tmp_path / "hf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hf" / name).write_text("{}")
    done = online("hub", "push", "hf", "some/model", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    listed = {file["file"] for file in json.loads(done.stdout)["files"]}
    assert "copy.md" in listed and not any(".part" in name or "cache" in name or "hidden" in name for name in listed)
    assert online("hub", "push", "hf", "some/model").returncode == 0
    assert set(hub.repos["some/model"]) == listed


@pytest.mark.parametrize(("code", "words"), [(401, "refuses access"), (403, "refuses access"), (500, "try again")])
def test_what_the_hub_refuses(online: Cli, hub: Hub, tmp_path: Path, code: int, words: str) -> None:
    write_model(tmp_path / "hf", layers=1)
    hub.refuse = code
    done = online("hub", "push", "hf", "some/model")
    assert done.returncode == 3 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_no_such_model_no_hub_and_wrong_ids(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    done = online("hub", "pull", "some/nothing")
    assert done.returncode == 3 and "no such model on the hub" in done.stderr
    hub.repos["some/dataset"] = {"data.txt": b"x"}
    done = online("hub", "pull", "some/dataset")
    assert done.returncode == 3 and "has no config.json" in done.stderr
    done = online("hub", "push", "hf", "model")
    assert done.returncode == 2 and "'model' is no hub id" in done.stderr
    for words in (("hub", "push", "hf", "some/model"), ("hub", "pull", "some/model")):
        done = online(*words, HF_ENDPOINT="http://127.0.0.1:9")
        assert done.returncode == 3 and "cannot be reached" in done.stderr, done.stderr
    done = online("hub", "push", "hf", "some/model", HF_HUB_OFFLINE="1")
    assert done.returncode == 3 and "unset HF_HUB_OFFLINE" in done.stderr


def test_a_token_that_cannot_be_sent_is_not_shown(online: Cli, hub: Hub, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    hub.repos["some/model"] = held(tmp_path / "hf")
    (tmp_path / "zero").write_bytes(b"hf_s3cr3t\0t0k3n")
    (tmp_path / "latin").write_bytes(b"hf_s3cr3t\xfft0k3n")
    zero, latin = ({"HF_TOKEN": "", "HF_TOKEN_PATH": str(tmp_path / name)} for name in ("zero", "latin"))
    plain = {"HF_TOKEN": "hf_s3cr3t\u00e9t0k3n"}
    for words, environment in (
        (("hub", "pull", "some/model", "copy"), plain),
        (("hub", "push", "hf", "some/model", "--debug"), plain),
        (("cast-fp8", "some/model"), zero),
        (("hub", "pull", "some/model", "--debug"), zero),
        (("hub", "pull", "some/model"), latin),
    ):
        done = online(*words, **environment)
        assert done.returncode == 3 and "has characters that no token has" in done.stderr, done.stderr
        shown = done.stdout + done.stderr
        assert "s3cr3t" not in shown and "t0k3n" not in shown, shown


def test_the_card_inherits_and_tells_of_the_cast(online: Cli, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", layers=1)
    assert online("cast-fp8", "hf", "--pow2-scale", "--device", "cpu").returncode == 0
    done = online("hub", "card", "hf-fp8", "--base-model", "Some/Model")
    assert done.returncode == 0, done.stderr
    for text in ("license: apache-2.0", "base_model: Some/Model", "base_model_relation: quantized", "powers of two"):
        assert text in done.stdout, text
    card = (tmp_path / "hf-fp8/README.md").read_text()  # a local source has no id: what its card says counts
    (tmp_path / "hf-fp8/README.md").write_text(card.replace("---\n#", "base_model: Some/Base\n---\n#"))
    done_own = online("hub", "card", "hf-fp8")
    assert "base_model: Some/Base" in done_own.stdout and "base_model_relation: quantized" in done_own.stdout
    (tmp_path / "hf-fp8/README.md").write_text(card)
    before = (tmp_path / "hf-fp8/README.md").read_text()
    assert "quantized" not in before
    for _ in range(2):  # writing it twice adds nothing
        assert online("hub", "card", "hf-fp8", "--base-model", "Some/Model", "--write").returncode == 0
        assert (tmp_path / "hf-fp8/README.md").read_text().rstrip() == done.stdout.rstrip()
