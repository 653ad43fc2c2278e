"""`paceline data VERB …`: make and check the files that training reads."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="data", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip


@app.callback()
def data() -> None:
    """Make and check the files that training reads."""
