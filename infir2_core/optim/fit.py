"""A checkpoint's optimizer state in the forms of another recipe: masters exactly, moments through float32.

Names are those of a checkpoint, `kind/hugging-face-name`, with the kinds of `AdamW.tensors` and `model` for weights.
A master is `model` in float32, or `model` in bfloat16 and `remainder` (a weight without one is taken as it is). A
moment is `adam.m` or `adam.v` in float32 or bfloat16, or in codes beside its `.scale`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.reference.moments import decode_moment, encode_moment, join, split
from ..ops.reference.stochastic import key
from ..precision.spec import QSpec
from .adamw import Forms


def describe(forms: Forms) -> dict[str, Any]:
    """The forms as JSON values, to be stored beside the tensors."""
    pairs = (("m", forms.m), ("v", forms.v))
    return {k: f.model_dump(mode="json", by_alias=True) if isinstance(f, QSpec) else f for k, f in pairs}


def fit(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], stored: Mapping[str, Any], forms: Forms, number: int
) -> dict[str, Tensor]:
    """The checkpoint's tensors with weights, masters and moments in the forms that are wanted.

    What is in the wanted form already is passed on as it is; what is missing stays missing.

    Args:
        tensors: of the checkpoint, on the CPU.
        wanted: names -> tensors of the dtypes that are needed.
        stored: `describe` of the forms of the checkpoint's moments; without an entry they are not coded.
        forms: of the moments that are wanted.
        number: of the update after which the checkpoint was taken; enters the random bits of a moment's rounding.
    """
    found = dict(tensors)
    for name in [n for n in wanted if n.startswith("model/") and n in tensors]:
        _fit_master(found, wanted, name, "remainder/" + name.removeprefix("model/"))
    for kind, form in (("m", forms.m), ("v", forms.v)):
        old = stored.get(kind)
        spec = QSpec.model_validate(old) if isinstance(old, Mapping) else None
        for name in [n for n in wanted if n.startswith(f"adam.{kind}/") and n in tensors]:
            _fit_moment(found, wanted, name, spec, form, number)
    return found


def _fit_master(found: dict[str, Tensor], wanted: Mapping[str, Tensor], name: str, other: str) -> None:
    if (other in wanted) == (other in found):
        return
    if other in found:
        found[name] = join(found[name], found.pop(other))
    else:
        found[name], found[other] = split(found[name].float())


def _fit_moment(
    found: dict[str, Tensor], wanted: Mapping[str, Tensor], name: str, old: QSpec | None, form: str | QSpec, number: int
) -> None:
    kind, _, rest = name.partition("/")
    scales = f"{kind}.scale/{rest}"
    if scales in found and old is not None:
        if scales in wanted and old == form:
            return
        found[name] = decode_moment(found[name], found.pop(scales), old)
    if scales in wanted and isinstance(form, QSpec) and found[name].shape == wanted[name].shape:
        values = found[name].float().contiguous()
        found[name], found[scales] = encode_moment(values, form, key(zlib.crc32(name.encode()), number))
    elif scales not in wanted:
        found[name] = found[name].to(torch.float32)
