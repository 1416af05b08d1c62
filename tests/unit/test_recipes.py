"""Recipes as data: every shipped file parses, round-trips and hashes; what cannot run says so."""

import json
import re

import pytest

from infir2_core.errors import InputError
from infir2_core.precision.recipe import FOLDER, LINEARS, from_json, list_recipes, load_recipe, parse

HASHES = {
    "bf16": "31256bd6fed9",
    "infir2": "3b3a133a3bfe",
    "infir2-lean": "5f44f36977b1",
    "infir2-fp32-scales": "d19fb7ba8667",
    "mxfp8": "d3c0489809cf",
}

# The rows of the published systems that the grammar has to hold (names as shipped).
SYSTEMS = """bf16 fp32 infir2 infir2-lean infir2-fp32-scales infir2-wgrad2d infir2-codes-shift infir2-fp8-head
fp8-current
fp8-delayed fp8-rowwise fp8-static mxfp8
deepseek-v3 jet-rl mxfp4-quartet nvfp4 halo0 halo1 halo2 coat eco spike-aware e8m3 gigatrain""".split()
RUNNABLE = """bf16 fp32 infir2 infir2-lean infir2-fp32-scales infir2-wgrad2d infir2-codes-shift infir2-fp8-head
fp8-current
fp8-delayed fp8-rowwise fp8-static mxfp8""".split()


def test_every_system_is_shipped_and_nothing_else() -> None:
    assert sorted(SYSTEMS) == list_recipes()


@pytest.mark.parametrize("name", SYSTEMS)
def test_round_trip_and_hash(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert parse(recipe.to_toml(), name) == recipe
    assert re.fullmatch(r"[0-9a-f]{12}", recipe.hash)
    assert from_json(json.loads(recipe.to_json()), name) == recipe


def test_hashes_differ_between_recipes_and_ignore_names() -> None:
    hashes = {load_recipe(name).hash for name in SYSTEMS}
    assert len(hashes) == len(SYSTEMS)
    recipe = load_recipe("infir2")
    assert recipe.model_copy(update={"name": "other", "description": "other"}).hash == recipe.hash


def test_which_recipes_run() -> None:
    assert [name for name in SYSTEMS if not load_recipe(name).missing()] == RUNNABLE
    assert load_recipe("nvfp4").missing() == [
        "format e2m1",
        "scale e4m3+fp32",
        "stochastic rounding",
        "transform hadamard",
        "phases",
    ]


@pytest.mark.parametrize(
    "change,piece",
    [
        (("block = [1, 128]", 'block = "row"'), "LM head in e4m3 row pow2"),
        (('x = "tile", w = "square"', 'x = "fp32", w = "square"'), "fp32 operands in a recipe that computes in bf16"),
        (("[[layers]]", 'accumulate = "promote(128)"\n\n[[layers]]'), "accumulation promote(128)"),
    ],
)
def test_what_would_not_be_executed_is_refused(change: tuple[str, str], piece: str) -> None:
    text = (FOLDER / "infir2-fp8-head.toml").read_text()
    assert change[0] in text
    assert parse(text.replace(*change), "test").missing() == [piece]


@pytest.mark.parametrize(
    "change,piece",
    [
        (("block = [1, 128]\nscale = \"pow2\"", "block = [1, 128]\nscale = \"fp32\""), "of e4m3 1x128 fp32"),
        (('fprop = { x = "tile"', 'fprop = { x = "bf16"'), "of x unquantised"),
        (("block = [128, 128]\nscale = \"pow2\"\nfrom", "block = [64, 128]\nscale = \"pow2\"\nfrom"), "64x128"),
        (('w = "square" }\nwgrad = { g = "tile", x = "shifted"', 'w = "shifted" }\nwgrad = { g = "tile", x = "tile"'),
         "column copy from codes_shift"),
    ],
)  # fmt: skip
def test_codes_that_cannot_be_shifted_are_refused(change: tuple[str, str], piece: str) -> None:
    text = (FOLDER / "infir2-codes-shift.toml").read_text()
    assert change[0] in text
    missing = parse(text.replace(*change), "test").missing()
    assert len(missing) == 1 and missing[0].startswith("column copy") and piece in missing[0]


def test_infir2_is_what_the_design_says() -> None:
    recipe = load_recipe("infir2")
    for role in LINEARS:
        policy = recipe.policy_for(f"layers.0.{role}", role, 0, 4)
        specs = [recipe.spec(name) for name in policy.operands().values()]
        if role == "head":
            assert specs == [None] * 6
            continue
        blocks = [s.block for s in specs if s]
        assert blocks == [(1, 128), (128, 128), (1, 128), (128, 128), (1, 128), (1, 128)]
        assert all(
            s and s.format == "e4m3" and s.scale == "pow2" and s.origin == "source" and s.rounding == "rne"
            for s in specs
        )


def test_wgrad2d_differs_from_infir2_in_one_operand() -> None:
    ours, base = load_recipe("infir2-wgrad2d"), load_recipe("infir2")
    changed = ours.policy["default"].model_copy(update={"wgrad": base.policy["default"].wgrad})
    assert ours.policy["default"].wgrad.g == "square"
    assert ours.model_copy(update={"policy": {"default": changed}}).hash == base.hash


def test_the_head_is_quantised_by_a_rule_and_by_no_other_recipe() -> None:
    roles = {name: load_recipe(name) for name in RUNNABLE}
    quantised = [n for n, r in roles.items() if any(map(r.spec, r.policy_for("head", "head").operands().values()))]
    assert quantised == ["infir2-fp8-head"]
    head = roles["infir2-fp8-head"].policy_for("head", "head")
    assert head == roles["infir2"].policy_for("layers.0.down", "down", 0, 4)


def test_hashes_of_shipped_recipes_stay() -> None:
    """Checkpoints and run folders refer to them."""
    hashes = {name: load_recipe(name).hash for name in ("bf16", "infir2", "infir2-lean", "infir2-fp32-scales", "mxfp8")}
    assert hashes == HASHES


def test_first_matching_rule_wins() -> None:
    rules = "".join(f'\n[[layers]]\nmatch = "{match}"\nuse = "bf16"\n' for match in ("layers.1.down", "last:1"))
    ruled = parse((FOLDER / "infir2.toml").read_text().replace("\n[[layers]]", rules + "\n[[layers]]"), "test")

    def plain(index: int, role: str) -> bool:
        return ruled.policy_for(f"layers.{index}.{role}", role, index, 4).fprop.x == "bf16"

    quantised = {(i, role) for i in range(4) for role in ("qkv", "down") if not plain(i, role)}
    assert quantised == {(0, "qkv"), (0, "down"), (1, "qkv"), (2, "qkv"), (2, "down")}


@pytest.mark.parametrize(
    "change,message",
    [
        (('scale = "pow2"', 'scale = "pow3"'), "scale"),
        (('x = "tile"', 'x = "tyle"'), "Did you mean 'tile'"),
        (('use = "bf16"', 'use = "bf61"'), "Did you mean 'bf16'"),
        (("format = 1", "format = 2"), "format"),
        (('name = "infir2"', 'name = "infir2"\ncolour = 3'), "colour"),
        (('format = "e4m3"', 'format = "fp8"'), "fp8"),
        (("[policy.default", "[policy.other"), "policy.default"),
        (("format = 1", "format = ["), "TOML"),
        (('match = "head"', 'match = "first:x"'), "first:x"),
    ],
)
def test_broken_recipes_are_refused_with_a_reason(change: tuple[str, str], message: str) -> None:
    text = (FOLDER / "infir2.toml").read_text()
    assert change[0] in text
    with pytest.raises(InputError, match=re.escape(message)):
        parse(text.replace(*change), "infir2.toml")


def test_misspelt_name_gives_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        load_recipe("infr2")
    assert "Did you mean 'infir2'?" in caught.value.hint and caught.value.exit_code == 3


def test_a_stored_recipe_that_was_edited_is_noticed() -> None:
    data = json.loads(load_recipe("infir2").to_json())
    data["compute"] = "fp32"
    with pytest.raises(InputError, match="changed by hand"):
        from_json(data, "recipe.json")
