"""`--data` and [data.NAME] to the weighted corpora of a run.

A corpus is a Megatron `.bin/.idx` prefix. Several named together share one weight in proportion to their tokens, so
that every document of the group is equally likely. What a corpus holds is checked by data/prefixes.py.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path

from ..errors import InputError
from .project import ProjectFile
from .schema import Blend

NO_DATA = "infir2 data prepare python-stdlib --out data/stdlib"


def absolute(text: str, base: Path) -> Path:
    """The path `text`, a relative one counting from `base`."""
    return Path(os.path.normpath(base / Path(text).expanduser()))


def mixture(
    given: list[str], project: ProjectFile | None, earlier: list[Blend], cwd: Path, vocab: int
) -> tuple[list[Blend], str]:
    """The blend of a run, every corpus checked, and the reference of the tokenizer it was made with.

    Args:
        given: `--data`, which replaces what the project names; relative paths count from `cwd`.
        project: its [data.NAME] tables, whose paths count from its own folder.
        earlier: what a decay phase falls back to.
        vocab: rows of the model's embedding.

    Raises:
        InputError: no data, a corpus that is missing or damaged, or ids beyond the vocabulary.
    """
    from ..data.prefixes import check_prefixes, describe_prefix

    pairs: list[tuple[float, str]] = []
    if given:
        for text in given:
            if not text.strip(" @"):  # as a path it would be the current folder
                raise InputError("--data is empty", "--data", "name a corpus, or leave it out")
            weight, spec = _weighted(text, cwd)
            pairs += _expand(weight, [spec], "--data")
    elif project and project.data:
        for name, section in project.data.items():
            specs = [_anchored(spec, project.folder) for spec in section.specs]
            pairs += _expand(section.weight, specs, project.where(f"data.{name}"))
    elif earlier:
        pairs = [(blend.weight, blend.prefix) for blend in earlier]
    else:
        raise InputError("no training data given", "--data, or [data.NAME] in infir2.toml", NO_DATA)
    prefixes = [prefix for _, prefix in pairs]
    check_prefixes(prefixes, vocab)
    made = describe_prefix(prefixes[0])["made"]
    tokenizer = str(made["tokenizer"]["ref"]) if made else ""
    return [Blend(prefix=prefix, weight=weight, content=_content(prefix)) for weight, prefix in pairs], tokenizer


def _content(prefix: str) -> str:
    """Digest of a corpus: the key that `data prepare` recorded, else one over its index and the size of its tokens."""
    from ..data.prefixes import describe_prefix

    made = describe_prefix(prefix)["made"]
    if made and made.get("content"):
        return str(made["content"])[:16]
    digest = hashlib.sha256(Path(f"{prefix}.idx").read_bytes())
    digest.update(str(Path(f"{prefix}.bin").stat().st_size).encode())
    return digest.hexdigest()[:16]


def _weighted(text: str, cwd: Path) -> tuple[float, str]:
    """`[WEIGHT:]PREFIX` or `WEIGHT PREFIX`; a prefix that exists as it is typed is never cut."""
    found = re.fullmatch(r"([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)(?:\s*:\s*|\s+)(\S.*)", text.strip())
    if not found or os.path.exists(f"{_anchored(text, cwd)}.idx"):
        return 1.0, _anchored(text.strip(), cwd)
    weight = float(found[1])
    if not 0 < weight < math.inf:
        raise InputError(f"a weight must be a positive number, not {found[1]}", f"--data {text!r}", "--data 0.3:PREFIX")
    return weight, _anchored(found[2], cwd)


def _expand(weight: float, specs: list[str], where: str) -> list[tuple[float, str]]:
    """The corpora of one group, their weights in proportion to tokens and adding up to `weight`."""
    from ..data.prefixes import expand_blend, read_index

    try:
        if len(specs) == 1:
            return expand_blend([(weight, specs[0])])
        groups = [expand_blend([(1.0, spec)]) for spec in specs]
        tokens = [sum(read_index(prefix).tokens for _, prefix in group) for group in groups]
        shares = [weight * count / sum(tokens) for count in tokens]
        return [(share * part, prefix) for share, group in zip(shares, groups, strict=True) for part, prefix in group]
    except InputError as error:
        place = where if error.where in ("", "--data") else f"{where}: {error.where}"
        raise InputError(error.what, place, error.hint) from error


def _anchored(spec: str, base: Path) -> str:
    """A data spec with its path made absolute; `@` in front of a list stays."""
    return f"@{absolute(spec[1:], base)}" if spec.startswith("@") else str(absolute(spec, base))
