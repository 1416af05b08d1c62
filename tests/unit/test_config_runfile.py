"""config.toml of a run: exact round trip, comparison, and the digits a run is named with."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infir2_core.config.presets import load_preset
from infir2_core.config.runfile import differences, fingerprint, read_config, write_config
from infir2_core.config.schema import Blend, CptSettings, ModelShape, RunConfig, Source
from infir2_core.errors import InputError

TINY = load_preset("tiny")
BASE = RunConfig(
    name="a",
    runs="/p/runs",
    size="tiny",
    model=TINY.model,
    source=Source(kind="scratch"),
    data=[Blend(prefix="/p/data/x", weight=0.3), Blend(prefix="/p/data/y", weight=0.7)],
    cpt=TINY.cpt,
)

text = st.text(max_size=20)
positive = st.floats(min_value=5e-324, max_value=1e300)
count = st.integers(1, 2**62)
fraction = st.floats(0, 1, exclude_max=True)
configs = st.builds(
    RunConfig,
    phase=st.sampled_from(["full", "decay"]),
    name=text,
    runs=text,
    size=text,
    model=st.builds(
        ModelShape,
        layers=st.integers(1, 1 << 13),
        hidden=st.integers(1, 1 << 20),
        ffn=st.integers(1, 1 << 22),
        heads=st.just(12),
        kv_heads=st.sampled_from([1, 2, 12]),
        head_dim=st.just(64),
        vocab=st.integers(1, 1 << 28),
        tied=st.booleans(),
        rope_base=positive,
        max_positions=count,
        norm_eps=positive,
    ),
    source=st.builds(
        Source,
        kind=st.sampled_from(["scratch", "hf", "checkpoint"]),
        path=text,
        optimizer=st.booleans(),
        check=st.booleans(),
    ),
    data=st.lists(st.builds(Blend, prefix=text, weight=positive), max_size=3),
    tokenizer=text,
    cpt=st.builds(
        lambda lr, share, **rest: CptSettings(**{**TINY.cpt.model_dump(), "lr": lr, "min_lr": lr * share, **rest}),
        recipe=text,
        lr=positive,
        share=fraction,
        beta1=fraction,
        eps=positive,
        seed=st.integers(0, 2**32 - 1),
        steps=st.integers(90, 2**62),
    ),
    device=text,
    ranks=count,
    deterministic=st.booleans(),
)


@given(configs)
def test_what_is_written_is_read_back_exactly(config: RunConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "config.toml"
        write_config(config, path)
        assert read_config(path) == config


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    write_config(BASE, path)
    whole = path.read_text()
    for old, new, place, words in (
        ("format = 1", "format = 7", ":1", "run folder format is 7"),
        ("format = 1\n", "", ":1", "run folder format is missing"),
        ("lr = 0.002", "lr = 0.002\nlrr = 1", ":", "unknown key 'cpt.lrr'. Did you mean 'lr'?"),
        ("steps = 300", "steps = 30", ":", "exceed steps (30)"),
        ("[cpt]", "[cpt", ":", "not valid TOML"),
    ):
        path.write_text(whole.replace(old, new, 1))
        with pytest.raises(InputError) as caught:
            read_config(path)
        assert caught.value.exit_code == 3
        assert caught.value.where.startswith(f"{path}{place}")
        assert words in caught.value.what
    with pytest.raises(InputError, match="No such file"):
        read_config(tmp_path / "absent.toml")


def changed(**changes: Any) -> RunConfig:
    data = BASE.model_dump()
    for key, value in changes.items():
        target = data
        *path, last = key.split("__")
        for part in path:
            target = target[part]
        target[last] = value
    return RunConfig.model_validate(data)


def test_differences_names_key_old_and_new() -> None:
    assert differences(BASE, BASE) == []
    other = changed(cpt__lr=0.001, cpt__recipe="bf16", model__tied=False, source__path="/w")
    assert differences(BASE, other) == [
        "model.tied: True -> False",
        "source.path: (empty) -> /w",
        "cpt.recipe: infir2 -> bf16",
        "cpt.lr: 0.002 -> 0.001",
    ]
    fewer = changed(data=[{"prefix": "/p/data/x", "weight": 0.3}])
    told = [line for line in differences(BASE, fewer) if "content" not in line]
    assert told == ["data.1.prefix: /p/data/y -> absent", "data.1.weight: 0.7 -> absent"]
    told = [line for line in differences(fewer, BASE) if "content" not in line]
    assert told == ["data.1.prefix: absent -> /p/data/y", "data.1.weight: absent -> 0.7"]


def test_name_runs_folder_and_device_are_not_settings() -> None:
    other = changed(name="b", runs="/q/runs", device="cuda", ranks=2)
    assert differences(BASE, other) == []
    assert fingerprint(other, Path("/p")) == fingerprint(BASE, Path("/p"))


def test_a_corpus_counts_by_its_content_wherever_it_lies() -> None:
    here, there, other = (
        changed(data=[{"prefix": prefix, "weight": 1.0, "content": content}])
        for prefix, content in (("/p/data/x", "aa"), ("/elsewhere/x", "aa"), ("/p/data/x", "bb"))
    )
    assert differences(here, there) == [] and fingerprint(here, Path("/p")) == fingerprint(there, Path("/p"))
    assert differences(here, other) == ["data.0.content: aa -> bb"]


def test_every_setting_changes_the_digits() -> None:
    for key in CptSettings.model_fields:
        before = getattr(BASE.cpt, key)
        after = before + "x" if isinstance(before, str) else before * 2 + 1
        other = BASE.model_copy(update={"cpt": BASE.cpt.model_copy(update={key: after})})
        assert fingerprint(other, Path("/p")) != fingerprint(BASE, Path("/p")), key
        assert len(differences(BASE, other)) == 1


def test_a_copy_of_the_project_keeps_its_digits() -> None:
    moved = changed(data=[{"prefix": "/q/data/x", "weight": 0.3}, {"prefix": "/q/data/y", "weight": 0.7}])
    assert fingerprint(moved, Path("/q")) == fingerprint(BASE, Path("/p"))
    assert fingerprint(moved, Path("/p")) != fingerprint(BASE, Path("/p"))
    digits = fingerprint(BASE, Path("/p"))
    assert len(digits) == 6 and int(digits, 16) >= 0
