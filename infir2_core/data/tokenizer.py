"""Text to token ids and back.

Two kinds: the built-in byte tokenizer (one id a UTF-8 byte, for `tiny` models and tests, needs no file), and any
Hugging Face fast tokenizer, read from its `tokenizer.json` by the light `tokenizers` package. transformers is not
imported, no chat template is applied here, and nothing is ever added around a text: the end-of-document id is put
between documents by prepare.py.

A tokenizer's `digest` covers what determines the ids it gives, so two folders with the same tokenizer agree and a
corpus can tell whether it was made with the tokenizer a model expects.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from infir2_core.errors import InputError, nearest

if TYPE_CHECKING:
    import tokenizers
    from numpy.typing import DTypeLike

BYTE = "byte"
# Names of the token that ends a document in pre-training. They come before `eos_token` of tokenizer_config.json, which
# in instruction-tuned variants is the end of a turn (Qwen2.5-Instruct: <|im_end|>).
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>")
END_OF_SEQUENCE = ("</s>", "<eos>")  # last resort, for a folder whose config names no eos_token


class Tokenizer(Protocol):
    """What the rest of infir2 asks of a tokenizer.

    Attributes:
        ref: what was given to `load_tokenizer`.
        location: "byte" or the local folder; another process loads the same tokenizer from it without a network.
        size: highest id plus one; a model's vocabulary must be at least this large.
        eod: id that ends a document.
        digest: sha256 (hex) of what determines the ids.
    """

    ref: str
    location: str
    size: int
    eod: int
    digest: str

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with nothing added before or after."""

    def encode_many(self, texts: Sequence[str], dtype: DTypeLike) -> list[np.ndarray]:
        """`encode` for each text as an array of `dtype`, faster than one at a time."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens shown by name."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One printable string for each id; bytes that are not a whole character appear as <0xE4>."""


class ByteTokenizer:
    """Ids 0..255 are the UTF-8 bytes; four named ids follow. `encode` never gives the named ones."""

    ref = location = BYTE
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
    size = 256 + len(names)
    eod = 256
    digest = hashlib.sha256("\n".join(("utf-8 bytes", *names)).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_many(self, texts: Sequence[str], dtype: DTypeLike) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(dtype) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        joined = b"".join(bytes((i,)) if i < 256 else self.names[i - 256].encode() for i in ids)
        return joined.decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.names[i - 256] if i >= 256 else chr(i) if i < 128 else f"<0x{i:02X}>" for i in ids]


class HfTokenizer:
    """A Hugging Face fast tokenizer (`tokenizer.json`, and `tokenizer_config.json` where there is one).

    Special tokens written out in a text get their own id, as transformers does; nothing else is added.
    """

    def __init__(self, ref: str, folder: Path) -> None:
        import tokenizers

        self.ref, self.location = ref, str(folder)
        path = folder / "tokenizer.json"
        content = _read_json(path)
        try:
            self.backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the Rust side raises bare Exception
            raise InputError(
                f"not a tokenizer: {error}", str(path), "give a folder with a Hugging Face tokenizer.json"
            ) from None
        self.backend.no_truncation()
        self.backend.no_padding()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError("the tokenizer has no tokens", str(path))
        self.size = max(vocabulary.values()) + 1
        self.eod = _end_of_document(vocabulary, folder)
        self.special = {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}
        parts = {key: content.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
        self.digest = hashlib.sha256(json.dumps([parts, self.eod], sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: Sequence[str], dtype: DTypeLike) -> list[np.ndarray]:
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.special.get(i) or self._piece(i) for i in ids]

    def _piece(self, i: int) -> str:
        text = self.decode([i])
        if text and "\ufffd" not in text:
            return text
        token = self.backend.id_to_token(i)
        if token is None:
            return f"<{i}>"
        # A byte-level vocabulary writes each byte as one printable character; show those of a cut character in hex.
        table = byte_alphabet()
        return "".join(f"<0x{table[c]:02X}>" for c in token) if all(c in table for c in token) else token


def load_tokenizer(ref: str) -> Tokenizer:
    """The tokenizer `ref` names: "byte", a folder with tokenizer.json, or a hub id such as Qwen/Qwen2.5-1.5B.

    Raises:
        InputError: no such folder or hub repository, no network for a hub id not downloaded yet, a broken file.
    """
    if ref == BYTE:
        return ByteTokenizer()
    folder = Path(ref).expanduser()
    if folder.is_file():
        folder = folder.parent
    if folder.is_dir():
        if not (folder / "tokenizer.json").is_file():
            raise InputError(
                "this folder has no tokenizer.json",
                str(folder),
                f"write one with transformers: AutoTokenizer.from_pretrained('{ref}').save_pretrained('{ref}')",
            )
        return HfTokenizer(ref, folder)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", ref):
        hint = (
            nearest(ref, [BYTE]).replace(" Valid: byte.", "") or "Give byte, a folder with tokenizer.json, or a hub id."
        )
        raise InputError(f"no such tokenizer: {ref}", "--tokenizer", hint)
    return HfTokenizer(ref, _download(ref))


def _download(ref: str) -> Path:
    """Fetch the tokenizer files of hub repository `ref` (or find them in the cache); their local folder."""
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    files = "tokenizer.json tokenizer_config.json"
    offline = f"on a connected machine: hf download {ref} {files} --local-dir DIR; then --tokenizer DIR"
    try:
        path = Path(hf_hub_download(ref, "tokenizer.json"))
        try:
            hf_hub_download(ref, "tokenizer_config.json")
        except hub.RemoteEntryNotFoundError:
            pass  # optional: the end of document is then found by name
    except hub.GatedRepoError:
        raise InputError(
            f"{ref} asks for a licence to be accepted first", "--tokenizer", "accept it on the hub, then: hf auth login"
        ) from None
    except hub.RepositoryNotFoundError:
        raise InputError(
            f"no such folder here and no such repository on the hub: {ref}", "--tokenizer", "check the spelling"
        ) from None
    except hub.RemoteEntryNotFoundError:
        raise InputError(
            f"{ref} has no tokenizer.json", "--tokenizer", "choose a repository with a fast tokenizer"
        ) from None
    except Exception as error:  # no network, offline mode, a proxy: many classes, one remedy
        raise InputError(
            f"cannot reach the hub for {ref} ({type(error).__name__}), and it is not in the local cache",
            "--tokenizer",
            offline,
        ) from None
    return path.parent


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"not JSON: {error}", str(path), "download the tokenizer again") from None
    if not isinstance(content, dict):
        raise InputError("not a JSON object", str(path), "download the tokenizer again")
    return content


def _end_of_document(vocabulary: dict[str, int], folder: Path) -> int:
    config_path = folder / "tokenizer_config.json"
    config = _read_json(config_path) if config_path.is_file() else {}
    eos = config.get("eos_token")
    named = eos.get("content") if isinstance(eos, dict) else eos  # older files store the token with its options
    for name in (*END_OF_DOCUMENT, named, *END_OF_SEQUENCE):
        if name in vocabulary:
            return vocabulary[name]
    raise InputError(
        "the tokenizer has no end-of-document token", str(config_path), 'add "eos_token" with a token of its vocabulary'
    )


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free code from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}
