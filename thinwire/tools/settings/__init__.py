"""Settings: frozen dataclasses, from which files and command-line options are made.

`fields` describes them, `building` makes them from plain values, `sections` reads and writes them, `options` shows them to
typer. Only `options` needs a package.
"""
