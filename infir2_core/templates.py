"""Text files made from the Jinja templates in templates/: project files now, job scripts where a launcher needs them.

A checkout keeps templates/ beside the packages; an installed wheel carries a copy inside this one. A template that
names a value nobody gave is an error, never an empty string.
"""

from __future__ import annotations

from pathlib import Path

from .errors import Infir2Error

_PACKAGED = Path(__file__).parent / "_templates"
_CHECKOUT = Path(__file__).parent.parent / "templates"


def folder() -> Path:
    """Where the templates are.

    Raises:
        Infir2Error: the installation is incomplete.
    """
    for place in (_PACKAGED, _CHECKOUT):
        if place.is_dir():
            return place
    raise Infir2Error("this installation has no templates", str(_PACKAGED), "install infir2 again")


def render(template: str, /, **values: object) -> str:
    """The text of `template` (a path below templates/, such as `project/infir2.toml.j2`) with `values` filled in.

    Strings reach TOML through the `toml` filter, which quotes them.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder()),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["toml"] = toml_string
    return environment.get_template(template).render(**values)


def toml_string(text: str) -> str:
    """`text` as a TOML basic string with its quotes."""
    import tomli_w

    return tomli_w.dumps({"x": text}).removeprefix("x = ").rstrip("\n")
