"""`infir2 recipes list|show`: who gets what format."""

from __future__ import annotations

from typing import Annotated

import typer

from ..output import DebugFlag, JsonFlag, emit, guarded, say, table

app = typer.Typer(help="Low-precision recipes: which operand of which layer gets which format.", no_args_is_help=True)


@app.command("list")
@guarded
def list_(json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """All recipes, and whether this version can run them."""
    from infir2_core.precision.recipe import list_recipes, load_recipe

    loaded = [load_recipe(name) for name in list_recipes()]
    data = [{"name": r.name, "hash": r.hash, "description": r.description, "missing": r.missing()} for r in loaded]

    def human() -> None:
        rows = [[r.name, "yes" if not r.missing() else "not yet", r.description] for r in loaded]
        table("Recipes", ["name", "runs", "what"], rows)
        say("infir2 recipes show NAME tells every operand, and what is missing.")

    emit(data, human)


@app.command("show")
@guarded
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name, or the path of a TOML file.")],
    toml: Annotated[bool, typer.Option("--toml", help="Print the recipe as TOML, to start one of your own.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Format, block and scale of each operand, per role of layer."""
    from infir2_core.precision.recipe import LINEARS, load_recipe

    recipe = load_recipe(name)
    who = {}
    for role in LINEARS:
        policy = recipe.policy_for(
            role if role == "head" else f"layers.1.{role}", role, None if role == "head" else 1, 99
        )
        specs = {operand: recipe.spec(spec) for operand, spec in policy.operands().items()}
        who[role] = {o: s.label() if s else policy.operands()[o] for o, s in specs.items()}

    def human() -> None:
        if toml:
            say(recipe.to_toml().rstrip())
            return
        say(f"{recipe.name}  {recipe.hash}", "bold")
        say(recipe.description)
        operands = list(next(iter(who.values())))
        table("", ["layer", *operands], [[role, *(who[role][o] for o in operands)] for role in who])
        say(f"embedding, attention, norms, residuals: {recipe.compute}")
        say(f"optimizer: {_optimizer(recipe.optimizer.model_dump())}")
        for rule in recipe.layers:
            say(f"rule: {rule.match} uses {rule.use}")
        for piece in recipe.missing():
            say(f"not implemented: {piece}", "yellow")

    emit({"recipe": recipe, "hash": recipe.hash, "operands": who, "missing": recipe.missing()}, human)


def _optimizer(fields: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items() if value != "none")
