"""The settings of a run: their schema, reading and writing them, and the errors of who mistypes one.

What a setting does lives in the package that does it; nothing here imports torch."""
