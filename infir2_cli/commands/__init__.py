"""One file per command: parse, plan, run."""
