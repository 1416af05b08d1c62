"""Tokenizers: the byte tokenizer against Python's own UTF-8, folders against transformers, every wrong reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_bpe import TEXT, train_bpe

from infir2_core.data.tokenizer import ByteTokenizer, load_tokenizer
from infir2_core.errors import InputError


@given(st.text())
def test_bytes_are_utf8_and_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode("utf-8")
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_many([text], "uint16")[0].tolist() == ids


def test_byte_special_ids_have_names() -> None:
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.size, tokenizer.eod) == (260, 256)
    assert tokenizer.decode([104, 105, 256, 257, 258, 259]) == "hi<|endoftext|><|im_start|><|im_end|><|pad|>"
    assert tokenizer.decode([0xE6, 0x97]) == "\ufffd"  # half a character does not raise
    assert tokenizer.pieces([65, 0xE6, 256]) == ["A", "<0xE6>", "<|endoftext|>"]


@given(st.text())
def test_bpe_round_trips_any_text_without_additions(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = _bpe(tmp_path_factory)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_many([text, text], np.int32)[1].tolist() == tokenizer.encode(text)


_cached: dict[str, object] = {}


def _bpe(factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    if "bpe" not in _cached:
        _cached["bpe"] = load_tokenizer(str(train_bpe(factory.mktemp("bpe"))))
    return _cached["bpe"]


def test_folder_agrees_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = train_bpe(tmp_path)
    ours, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    for text in (TEXT, "", " x", "a<|im_start|>b", "\n\n\t", "日本"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.eod == theirs.eos_token_id
    assert ours.size == len(theirs)


def test_pieces_show_cut_characters_in_hex(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(train_bpe(tmp_path, 260)))  # hardly a merge: every byte of 日 is its own token
    ids = tokenizer.encode("a日")
    assert tokenizer.pieces([*ids, tokenizer.eod]) == ["a", "<0xE6>", "<0x97>", "<0xA5>", "<|endoftext|>"]


def test_size_counts_ids_beyond_the_vocabulary_size(tmp_path: Path) -> None:
    folder = train_bpe(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][-1] = {**content["added_tokens"][-1], "id": 2, "content": "<|im_end|>"}
    content["model"]["vocab"]["zzz"] = 999  # ids may have gaps: what counts is the highest one
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(folder)).size == 1000


def test_document_end_of_an_instruct_tokenizer_is_not_the_end_of_a_turn(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(train_bpe(tmp_path, eos_token="<|im_end|>")))
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_document_end_from_the_config_when_the_name_is_unusual(tmp_path: Path) -> None:
    folder = train_bpe(tmp_path, special=("<start>", "<fin>"), eos_token={"content": "<fin>", "lstrip": False})
    assert load_tokenizer(str(folder)).eod == 1


def test_no_document_end_is_refused(tmp_path: Path) -> None:
    folder = train_bpe(tmp_path, special=("<start>",), eos_token=None)
    with pytest.raises(InputError, match="no end-of-document token") as error:
        load_tokenizer(str(folder))
    assert "eos_token" in error.value.hint


def test_digest_follows_what_determines_ids(tmp_path: Path) -> None:
    one, same, other = train_bpe(tmp_path / "a"), train_bpe(tmp_path / "b"), train_bpe(tmp_path / "c", 280)
    content = json.loads((same / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (same / "tokenizer.json").write_text(json.dumps(content, indent=1))
    digests = [load_tokenizer(str(folder)).digest for folder in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert len(load_tokenizer(str(same)).encode(TEXT)) > 4  # a stored truncation must not cut documents


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("bite", "no such tokenizer"),
        ("./nowhere/tokenizer", "no such tokenizer"),
        ("no-such-owner/no-such-model", "cannot reach the hub"),
    ],
)
def test_wrong_references(ref: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=message) as error:
        load_tokenizer(ref)
    assert error.value.hint


def test_hub_id_uses_the_downloaded_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = train_bpe(tmp_path)
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda repo, name: asked.append((repo, name)) or folder / name
    )
    tokenizer = load_tokenizer("some/model")
    assert asked == [("some/model", "tokenizer.json"), ("some/model", "tokenizer_config.json")]
    assert (tokenizer.ref, tokenizer.location) == ("some/model", str(folder))


def test_folder_without_or_with_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    for content, message in (("{", "not JSON"), ("[]", "not a JSON object"), ('{"model": 3}', "not a tokenizer")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(InputError, match=message):
            load_tokenizer(str(tmp_path))


def test_light_imports(tmp_path: Path) -> None:
    folder = train_bpe(tmp_path)
    code = (
        "import sys; from infir2_core.data.tokenizer import load_tokenizer as t;"
        f"t({str(folder)!r}); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
