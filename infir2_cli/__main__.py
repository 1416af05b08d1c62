"""`python -m infir2_cli` is the console script `infir2`."""

from __future__ import annotations

from infir2_cli.main import main

main()
