"""Project file + preset + flags -> one resolved, validated `RunConfig`. Imports no torch."""
