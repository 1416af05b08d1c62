"""The command line: one file per command, one sink for output. Imports no torch before a command runs."""
