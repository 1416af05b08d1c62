"""Flags, project file and preset become one run: precedence, derived values, every refusal by message and exit code."""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infir2_core.config.hf_config import shape_to_hf
from infir2_core.config.presets import load_preset
from infir2_core.config.project import FILE, load_project
from infir2_core.config.resolve import CptFlags, Resolved, resolve_cpt, write_config
from infir2_core.config.schema import CptSettings, RunConfig
from infir2_core.errors import Infir2Error, InputError, UsageError

TINY = load_preset("tiny")


def corpus(prefix: Path, tokens: int = 100, size: int = 260) -> str:
    """A Megatron corpus of one document of `tokens` ids, written by hand, and what `data prepare` notes beside it."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
    Path(f"{prefix}.idx").write_bytes(head + struct.pack("<iqqq", tokens, 0, 0, 1))
    Path(f"{prefix}.bin").write_bytes(bytes(2 * tokens))
    made = {"tokens": tokens, "documents": 1, "max_id": 0, "tokenizer": {"ref": "byte", "size": size, "digest": "d"}}
    Path(f"{prefix}.json").write_text(json.dumps(made))
    return str(prefix)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a corpus at data/text."""
    corpus(tmp_path / "data" / "text")
    return tmp_path


def resolve(here: Path, project: str | None = None, download: bool = True, **flags: Any) -> Resolved:
    """Resolves `flags` over a project file with the given text, in the folder `here`."""
    flags = {"data": ["data/text"], **flags} if project is None or "[data" not in project else flags
    loaded = None
    if project is not None:
        (here / FILE).write_text("format = 1\n" + project)
        loaded = load_project(here / FILE)
    return resolve_cpt(CptFlags(**flags), loaded, here, download)


def refused(kind: type[Infir2Error], here: Path, *words: str, **flags: Any) -> Infir2Error:
    with pytest.raises(kind) as caught:
        resolve(here, **flags)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def run_folder(config: RunConfig, *steps: int) -> Path:
    """The run folder of `config`, with checkpoints as far as finding them goes."""
    run = Path(config.runs) / config.name
    write_config(config, run / "config.toml")
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        content = {"step": step, "state": {"engine": {"model": config.model.model_dump()}}}
        (folder / "manifest.json").write_text(json.dumps(content))
    return run


def hf_folder(path: Path, size: str, **changes: Any) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape_to_hf(load_preset(size).model) | changes))
    (path / "model.safetensors").write_bytes(b"")
    return str(path)


# Layers


def test_the_preset_alone(here: Path) -> None:
    made = resolve(here, size="tiny")
    config = made.config
    assert made.notes == []
    assert config.cpt == TINY.cpt and config.model == TINY.model
    assert config.source.kind == "scratch" and config.phase == "full" and config.stage == "cpt"
    assert config.runs == str(here / "runs") and (config.device, config.ranks, config.deterministic) == (
        "cpu",
        1,
        False,
    )
    assert [(blend.prefix, blend.weight) for blend in config.data] == [(str(here / "data" / "text"), 1.0)]
    assert config.tokenizer == "byte"


def test_there_is_a_flag_for_every_setting() -> None:
    names = {field.name for field in fields(CptFlags)}
    assert set(CptSettings.model_fields) <= names
    given = CptFlags(**{name: 0 for name in CptSettings.model_fields})
    assert given.settings() == dict.fromkeys(CptSettings.model_fields, 0)


OTHER: dict[str, tuple[Any, Any]] = {  # two valid values, neither the preset's
    "recipe": ("bf16", "fp32"),
    "steps": (200, 250),
    "seq_len": (64, 128),
    "global_batch": (16, 24),
    "micro_batch": (2, 4),
    "schedule": ("cosine", "constant"),
    "split": ("80,10,10", "98,1,1"),
    "recompute": ("full", "selective"),
    "lr": (0.01, 0.02),
    "beta1": (0.5, 0.6),
    "beta2": (0.5, 0.6),
}


@pytest.mark.parametrize("name", CptSettings.model_fields)
def test_flags_win_over_the_project_and_the_project_over_the_preset(here: Path, name: str) -> None:
    before = getattr(TINY.cpt, name)
    low, high = OTHER.get(name) or ((before + 1, before + 2) if isinstance(before, int) else (before / 2, before / 4))
    text = f'[model]\nsize = "tiny"\n[cpt]\n{name} = {json.dumps(low)}'
    assert getattr(resolve(here, text).config.cpt, name) == low
    assert getattr(resolve(here, text, **{name: high}).config.cpt, name) == high
    assert getattr(resolve(here, size="tiny", **{name: high}).config.cpt, name) == high


def test_places_of_the_project_count_from_its_folder_and_flags_from_where_they_are_typed(here: Path) -> None:
    below = here / "below"
    corpus(below / "own")
    (here / FILE).write_text('format = 1\nproject.runs = "out"\nmodel.size = "tiny"\ndata.a.prefixes = "data/text"')
    project = load_project(here / FILE)
    plain = resolve_cpt(CptFlags(), project, below).config
    assert (plain.runs, plain.data[0].prefix) == (str(here / "out"), str(here / "data" / "text"))
    typed = resolve_cpt(CptFlags(data=["own"], runs="r"), project, below).config
    assert (typed.runs, typed.data[0].prefix) == (str(below / "r"), str(below / "own"))


def test_everything_else_a_flag_says(here: Path) -> None:
    flags = {"device": "cuda", "ranks": 2, "deterministic": True, "name": "mine"}
    config = resolve(here, size="tiny", micro_batch=2, **flags).config
    assert {name: getattr(config, name) for name in flags} == flags


# Where the weights come from


@pytest.mark.parametrize("size", ["0.5b", "1.5b", "3b", "7b"])
def test_random_weights_must_be_asked_for(here: Path, size: str) -> None:
    error = refused(InputError, here, "continual pre-training from random weights must be asked for", size=size)
    assert error.exit_code == 3
    assert "--from HF_DIR" in error.hint and "--from-scratch" in error.hint
    assert resolve(here, size=size, from_scratch=True).config.source.kind == "scratch"
    assert resolve(here, size="small").config.source.kind == "scratch"


def test_a_size_of_the_project_is_named_when_it_needs_weights(here: Path) -> None:
    error = refused(InputError, here, "must be asked for", project='[model]\nsize = "7b"')
    assert error.where == f"{here / FILE}:3: model.size"


def test_a_hugging_face_folder_gives_the_architecture(here: Path) -> None:
    folder = hf_folder(here / "math", "1.5b", rope_parameters=None, rope_theta=10000, max_position_embeddings=4096)
    made = resolve(here, from_="math", seq_len=4096)
    assert made.config.size == "1.5b" and "size 1.5b, read from" in made.notes[0]
    assert (made.config.model.rope_base, made.config.model.max_positions) == (10000.0, 4096)
    assert made.config.source.model_dump() == {"kind": "hf", "path": folder, "optimizer": False, "check": True}
    assert not resolve(here, from_="math", seq_len=4096, skip_load_check=True).config.source.check
    error = refused(InputError, here, "seq_len (32768) is above the 4096 positions", from_="math")
    assert error.exit_code == 3 and error.hint == "--seq-len 4096" and error.where == "preset 1.5b"


def test_a_size_that_contradicts_the_weights_names_both(here: Path) -> None:
    hf_folder(here / "hf", "0.5b")
    words = ("layers is 28 for 1.5b and 24 in the weights (num_hidden_layers)", "--size 0.5b")
    error = refused(InputError, here, *words, size="1.5b", from_="hf")
    assert error.exit_code == 3 and error.where == f"--size: {here / 'hf' / 'config.json'}"
    project = '[model]\nsize = "1.5b"\nfrom = "hf"'
    assert f"{FILE}:3: model.size" in refused(InputError, here, *words, project=project).where


def test_weights_of_no_known_size(here: Path) -> None:
    hf_folder(here / "hf", "0.5b", num_hidden_layers=7)
    refused(InputError, here, "fit none of the sizes", from_="hf")


def test_a_run_or_checkpoint_gives_its_weights_without_the_optimizer(here: Path) -> None:
    run = run_folder(resolve(here, size="tiny", name="first").config, 100, 200)
    for reference in ("first", "runs/first", str(run / "checkpoints" / "step-00000200")):
        config = resolve(here, from_=reference).config
        assert config.size == "tiny"
        assert config.source.path == str(run / "checkpoints" / "step-00000200")
        assert (config.source.kind, config.source.optimizer) == ("checkpoint", False)
    refused(InputError, here, "layers is 7 for small and 3 in the weights", size="small", from_="first")


def test_from_of_the_stage_wins_over_from_of_the_model(here: Path) -> None:
    hf_folder(here / "a", "0.5b")
    hf_folder(here / "b", "0.5b")
    text = '[model]\nsize = "0.5b"\nfrom = "a"\n[cpt]\n'
    assert resolve(here, text).config.source.path == str(here / "a")
    assert resolve(here, text + 'from = "b"').config.source.path == str(here / "b")
    assert resolve(here, text + 'from = "b"', from_="a").config.source.path == str(here / "a")
    assert resolve(here, text + 'from = "b"', from_scratch=True).config.source.kind == "scratch"
    error = refused(InputError, here, "'c' is no folder", project=text + 'from = "c"')
    assert error.where == f"{here / FILE}:6: cpt.from"


def test_a_small_try_of_a_large_project_leaves_its_weights_aside(here: Path) -> None:
    text = '[model]\nsize = "7b"\nfrom = "Qwen/Qwen2.5-7B"\n'
    made = resolve(here, text, size="tiny")
    assert made.config.size == "tiny" and made.config.source.kind == "scratch"
    assert "Qwen/Qwen2.5-7B is meant for size 7b; tiny starts from random weights" in made.notes[0]
    hf_folder(here / "hf", "0.5b")
    refused(InputError, here, "contradicts the weights", project='[model]\nfrom = "hf"', size="tiny")


def test_no_size_at_all(here: Path) -> None:
    error = refused(UsageError, here, "no model size given", "tiny, small")
    assert error.exit_code == 2


def test_a_misspelt_size(here: Path) -> None:
    assert refused(InputError, here, "no preset for size '7bb'", "Did you mean '7b'?", size="7bb").exit_code == 3


# Flags that do not go together


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"from_": "x", "from_scratch": True}, "--from and --from-scratch exclude each other"),
        ({"steps": 5, "tokens": 5.0}, "--steps and --tokens both say how long to train"),
        ({"load": "x"}, "--load belongs to the decay phase"),
        ({"load": "x", "phase": "full"}, "--load belongs to the decay phase"),
        ({"phase": "decay"}, "the decay phase needs a checkpoint to load"),
        ({"phase": "decay", "load": "x", "from_": "y"}, "starts from --load, not --from"),
        ({"phase": "decay", "load": "x", "from_scratch": True}, "starts from --load, not --from-scratch"),
        ({"phase": "decay", "load": "x", "warmup_steps": 5}, "the decay phase has no warm-up"),
        ({"phase": "decay", "load": "x", "schedule": "cosine"}, "is one of wsd, not of cosine"),
        ({"phase": "decya", "load": "x"}, "Did you mean 'decay'?"),
    ],
)
def test_contradicting_flags_are_usage_errors(here: Path, flags: dict[str, Any], words: str) -> None:
    assert refused(UsageError, here, words, size="tiny", **flags).exit_code == 2


@pytest.mark.parametrize(
    ("flags", "where", "words"),
    [
        ({"lr": -1.0}, "--lr", "lr must be above 0, not -1.0"),
        ({"lr": float("inf")}, "--lr", "lr must be a finite number"),
        ({"schedule": "wds"}, "--schedule", "Did you mean 'wsd'?"),
        ({"recipe": "infr2"}, "--recipe", "Did you mean 'infir2'?"),
        ({"recipe": "absent.toml"}, "--recipe", "no recipe file"),
        ({"lr": 1e-4}, "--lr, preset tiny", "min_lr (0.0002) is above lr (0.0001)"),
        ({"split": "half"}, "--split", "split must be three shares"),
        ({"steps": 0}, "--steps", "steps must be above 0, not 0"),
        ({"steps": 20, "warmup_steps": 30}, "--steps, --warmup-steps, preset tiny", "exceed steps (20)"),
        ({"steps": 20, "warmup_steps": 5, "decay_steps": 16}, "--steps", "warmup_steps (5) + decay_steps (16)"),
        ({"tokens": 0.5}, "--tokens", "a whole number above 0, not 0.5"),
        ({"tokens": float("nan")}, "--tokens", "a whole number above 0, not nan"),
        ({"tokens": 1e6, "seq_len": 0}, "--seq-len", "seq_len must be above 1, not 0"),
        ({"seq_len": 4096}, "--seq-len", "seq_len (4096) is above the 2048 positions"),
        ({"ranks": 0}, "--ranks", "ranks must be at least 1"),
        ({"name": "a/b"}, "--name", "'a/b' cannot name a run folder"),
        ({"name": ".."}, "--name", "cannot name a run folder"),
    ],
)
def test_bad_values_name_their_flag(here: Path, flags: dict[str, Any], where: str, words: str) -> None:
    error = refused(InputError, here, words, size="tiny", **flags)
    assert error.exit_code == 3
    assert error.where.startswith(where), error.where


def test_bad_values_of_the_project_name_their_line(here: Path) -> None:
    error = refused(InputError, here, "is above lr", project='[model]\nsize = "tiny"\n[cpt]\nlr = 1e-5')
    assert error.where == f"{here / FILE}:5: cpt.lr, preset tiny"
    assert error.hint == "change --lr or --min-lr"


def test_several_bad_values_are_told_at_once(here: Path) -> None:
    refused(
        InputError, here, "2 settings are wrong", "--lr: lr must", "--clip: clip must", size="tiny", lr=0.0, clip=-1.0
    )


# Batches


def test_a_batch_that_does_not_divide_names_three_numbers_and_the_nearest(here: Path) -> None:
    flags = {"global_batch": 13, "micro_batch": 2, "ranks": 3}
    words = ("global_batch (13) must be a multiple of micro_batch (2) x ranks (3) = 6", "--global-batch 12")
    error = refused(InputError, here, *words, size="tiny", **flags)
    assert error.exit_code == 3 and error.where == "--global-batch, --micro-batch, --ranks"
    refused(InputError, here, "micro_batch (8) x ranks (1) = 8", "--global-batch 8", size="tiny", global_batch=2)


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 8))
def test_the_nearest_batch_is_valid_and_nearest(total: int, micro: int, ranks: int) -> None:
    if total % (micro * ranks) == 0:
        return
    with pytest.raises(InputError) as caught:
        flags = CptFlags(size="tiny", global_batch=total, micro_batch=micro, ranks=ranks)
        resolve_cpt(flags, None, Path("/nowhere"))
    offered = int(caught.value.hint.split()[1])
    valid = [n for n in range(1, 500) if n % (micro * ranks) == 0]
    assert offered in valid and abs(offered - total) == min(abs(n - total) for n in valid)


# Length


def test_tokens_become_steps_rounded_up(here: Path) -> None:
    batch = 8 * 256
    for tokens, steps in ((batch * 300, 300), (batch * 300 + 1, 301), (1e6, 489)):
        made = resolve(here, size="tiny", tokens=float(tokens))
        assert made.config.cpt.steps == steps and f"{steps:,} steps" in made.notes[0]
    assert resolve(here, size="tiny", tokens=1e6, global_batch=16, seq_len=512).config.cpt.steps == 123
    text = '[model]\nsize = "tiny"\n[cpt]\ntokens = 1e6'
    assert resolve(here, text).config.cpt.steps == 489
    assert resolve(here, text, steps=100).config.cpt.steps == 100
    assert resolve(here, text.replace("tokens = 1e6", "steps = 95"), tokens=1e6).config.cpt.steps == 489


def test_any_length_is_possible_with_the_presets_warm_up_and_decay(here: Path) -> None:
    for steps in range(1, 120):
        cpt = resolve(here, size="tiny", steps=steps).config.cpt
        assert cpt.steps == steps and cpt.warmup_steps + cpt.decay_steps <= steps
        assert abs(cpt.decay_steps - (60 if steps >= 90 else 0.2 * steps)) < 1


@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(300, 30, 60), (90, 30, 60), (89, 8, 17), (10, 1, 2), (1, 0, 0)]
)
def test_warm_up_and_decay_shrink_only_when_they_must_and_say_so(
    here: Path, steps: int, warmup: int, decay: int
) -> None:
    for flags in ({"steps": steps}, {"tokens": float(steps * 2048)}):
        made = resolve(here, size="tiny", **flags)
        assert (made.config.cpt.warmup_steps, made.config.cpt.decay_steps) == (warmup, decay)
        shrunk = [note for note in made.notes if "share" in note]
        assert len(shrunk) == (2 if steps < 90 else 0)
    cosine = resolve(here, size="tiny", steps=89, schedule="cosine").config.cpt
    assert cosine.warmup_steps == 30, "cosine has no separate decay, so the warm-up still fits"


def test_a_given_warm_up_or_decay_is_never_changed(here: Path) -> None:
    made = resolve(here, size="tiny", steps=50, warmup_steps=5)
    assert (made.config.cpt.warmup_steps, made.config.cpt.decay_steps) == (5, 10)
    assert made.notes == ["decay_steps 60 -> 10: the preset's share of 50 steps"]
    made = resolve(here, '[model]\nsize = "tiny"\n[cpt]\ndecay_steps = 40', steps=50)
    assert (made.config.cpt.warmup_steps, made.config.cpt.decay_steps) == (5, 40)


# The decay phase


def stable(here: Path, **flags: Any) -> Path:
    """A run folder with checkpoints at steps 100 and 240 of 300, decaying from 240 on."""
    made = resolve(here, size="tiny", name="stable", lr=1e-3, recipe="bf16", seed=7, **flags)
    return run_folder(made.config, 100, 240)


def test_the_decay_phase_takes_the_loaded_runs_settings_and_a_fresh_schedule(here: Path) -> None:
    folder = stable(here) / "checkpoints" / "step-00000240"
    made = resolve_cpt(CptFlags(phase="decay", load=str(folder)), None, here)
    config, cpt = made.config, made.config.cpt
    assert (config.phase, config.size) == ("decay", "tiny")
    assert config.source.model_dump() == {"kind": "checkpoint", "path": str(folder), "optimizer": True, "check": True}
    assert (cpt.schedule, cpt.warmup_steps, cpt.decay_steps, cpt.steps) == ("wsd", 0, 60, 60)
    assert (cpt.lr, cpt.recipe, cpt.seed) == (1e-3, "bf16", 7)
    assert [blend.prefix for blend in config.data] == [str(here / "data" / "text")]
    assert config.name.startswith("cpt-decay-tiny-bf16-")
    assert not any("stable phase" in note for note in made.notes)
    assert resolve(here, phase="decay", load="stable").config == config, "a run means its newest checkpoint"


@pytest.mark.parametrize(
    ("flags", "steps", "decay"),
    [
        ({"steps": 20}, 20, 20),
        ({"decay_steps": 20}, 20, 20),
        ({"steps": 30, "decay_steps": 20}, 30, 20),
        ({"tokens": 2048.0 * 25}, 25, 25),
        ({"warmup_steps": 0}, 60, 60),
    ],
)
def test_the_length_of_a_decay_phase(here: Path, flags: dict[str, Any], steps: int, decay: int) -> None:
    stable(here)
    cpt = resolve(here, phase="decay", load="stable", **flags).config.cpt
    assert (cpt.steps, cpt.decay_steps, cpt.warmup_steps) == (steps, decay, 0)


def test_the_projects_length_is_that_of_the_full_run(here: Path) -> None:
    stable(here)
    text = '[model]\nsize = "tiny"\nfrom = "elsewhere"\n[cpt]\n{}\nclip = 0.5'
    for line in ("steps = 4000", "tokens = 1e9", "warmup_steps = 7", 'schedule = "cosine"'):
        cpt = resolve(here, text.format(line), phase="decay", load="stable").config.cpt
        assert (cpt.steps, cpt.decay_steps, cpt.warmup_steps, cpt.schedule, cpt.clip) == (60, 60, 0, "wsd", 0.5)


def test_a_run_without_a_decay_of_its_own_takes_the_presets(here: Path) -> None:
    stable(here, schedule="constant", decay_steps=0)
    made = resolve(here, phase="decay", load="stable")
    assert (made.config.cpt.steps, made.config.cpt.decay_steps) == (60, 60)


def test_a_checkpoint_from_the_decay_is_pointed_out(here: Path) -> None:
    late = run_folder(resolve(here, size="tiny", name="late").config, 241)
    notes = resolve(here, size="tiny", phase="decay", load=str(late)).notes
    assert "not from the stable phase" in notes[0]


def test_what_the_decay_phase_cannot_load(here: Path) -> None:
    hf_folder(here / "hf", "0.5b")
    assert refused(InputError, here, "needs optimizer state", phase="decay", load="hf").exit_code == 3
    moved = here / "moved"
    (stable(here) / "checkpoints" / "step-00000240").rename(moved)
    refused(InputError, here, "needs the settings of the loaded run", phase="decay", load="moved")
    error = refused(InputError, here, "contradicts the weights", phase="decay", load="stable", size="small")
    assert error.where.startswith("--size: ")
    refused(InputError, here, "'absent' is no folder", phase="decay", load="absent")


# Data


def test_no_data_says_how_to_make_some(here: Path) -> None:
    for project in (None, '[model]\nsize = "tiny"'):
        error = refused(InputError, here, "no training data given", project=project, size="tiny", data=None)
        assert error.exit_code == 3
        assert error.hint == "infir2 data prepare python-stdlib --out data/stdlib"


@pytest.mark.parametrize("spec", ["0.25:data/text", "0.25 data/text", "2.5e-1: data/text", " .25   data/text "])
def test_weights_of_flags(here: Path, spec: str) -> None:
    config = resolve(here, size="tiny", data=[spec, "data/text"]).config
    assert [(blend.prefix, blend.weight) for blend in config.data] == [
        (str(here / "data" / "text"), 0.25),
        (str(here / "data" / "text"), 1.0),
    ]


def test_a_prefix_that_looks_weighted_is_one_when_it_exists(here: Path) -> None:
    corpus(here / "2024 news")
    assert resolve(here, size="tiny", data=["2024 news"]).config.data[0].prefix == str(here / "2024 news")
    refused(InputError, here, "a weight must be a positive number, not 0", size="tiny", data=["0:data/text"])
    refused(InputError, here, "a weight must be a positive number, not -1", size="tiny", data=["-1:data/text"])


def test_groups_share_their_weight_by_tokens(here: Path) -> None:
    for name, tokens in (("a", 100), ("b", 300)):
        corpus(here / "web" / name, tokens)
    corpus(here / "code", 600)
    (here / "list.txt").write_text("web/a\nweb/b\n")
    a, b, code = (str(here / name) for name in ("web/a", "web/b", "code"))
    for spec in ("4:web/*", "4:@list.txt", f"4:{here}/web/*"):
        data = resolve(here, size="tiny", data=[spec, "2:code"]).config.data
        assert {blend.prefix: blend.weight for blend in data} == {a: 1.0, b: 3.0, code: 2.0}
    text = '[data.x]\nweight = 10\nprefixes = ["web/*", "code"]\n[data.y]\nprefixes = "data/text"\n'
    text += '[model]\nsize = "tiny"'
    data = resolve(here, text).config.data
    expected = {a: 1.0, b: 3.0, code: 6.0, str(here / "data/text"): 1.0}
    assert {blend.prefix: blend.weight for blend in data} == pytest.approx(expected)
    assert len(resolve(here, text, data=["data/text"]).config.data) == 1, "--data replaces what the project names"


def test_data_that_cannot_be_used(here: Path) -> None:
    refused(InputError, here, "no such file", "data/txet", size="tiny", data=["data/txet"])
    error = refused(InputError, here, "no corpus matches", size="tiny", data=["none/*"])
    assert error.exit_code == 3 and error.where == "--data"
    text = '[model]\nsize = "tiny"\n[data.web]\nprefixes = "none/*"'
    assert refused(InputError, here, "no corpus matches", project=text).where == f"{here / FILE}:4: data.web"
    corpus(here / "big", size=1000)
    refused(InputError, here, "has 1,000 ids, but the model's vocabulary has 260", size="tiny", data=["big"])


# Names


def test_names_follow_the_settings(here: Path) -> None:
    name = resolve(here, size="tiny").config.name
    assert name[:-6] == "cpt-tiny-infir2-" and int(name[-6:], 16) >= 0
    assert resolve(here, size="tiny", runs="elsewhere", device="cuda").config.name == name
    assert resolve(here, size="tiny", lr=0.002).config.name == name, "the same value, given or not"
    changed = [{"lr": 1e-3}, {"seed": 1}, {"steps": 299}, {"data": ["0.5:data/text"]}, {"deterministic": True}]
    names = [resolve(here, size="tiny", **flags).config.name for flags in changed]
    assert len({name, *names}) == 1 + len(names)


def test_a_copied_project_names_its_runs_the_same(tmp_path: Path) -> None:
    names = set()
    for folder in (tmp_path / "a", tmp_path / "b" / "c"):
        corpus(folder / "data" / "text")
        (folder / "mine.toml").write_text("")
        text = '[model]\nsize = "tiny"\n[data.x]\nprefixes = "data/text"\n[cpt]\nrecipe = "mine.toml"'
        config = resolve(folder, text).config
        assert config.cpt.recipe == str(folder / "mine.toml")
        names.add(config.name)
    assert len(names) == 1 and names.pop().startswith("cpt-tiny-mine-")
