"""Progress in a notebook: a bar and a table of evaluations in one cell output, updated in place."""

from collections.abc import Mapping
from html import escape
from typing import Any

from IPython.display import display as publish
from tqdm import tqdm

_TEXT = "{percentage:3.0f}%  {n_fmt}/{total_fmt}{postfix}, {remaining} left"
_NUMBER = 'style="text-align: right; padding: 0 1em"'


class NotebookBar(tqdm):
    """tqdm's bar as HTML, with a table row for each evaluation.

    Front ends without HTML show plain text. The bar does not need ipywidgets.
    """

    def __init__(self, **settings: Any) -> None:
        self._handle: Any = None
        self._rows: list[dict[str, str]] = []
        # With gui=True, tqdm does not write to a stream.
        super().__init__(bar_format=_TEXT, gui=True, **settings)
        self.refresh()

    def display(self, *_: Any, **__: Any) -> None:
        """Show the bar and the table in place of the previous output."""
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        cells = [[row.get(name, "") for name in columns] for row in self._rows]
        table = "".join(
            f"<tr>{''.join(f'<td {_NUMBER}>{escape(cell)}</td>' for cell in row)}</tr>" for row in (columns, *cells)
        )
        bar = f'<progress value="{self.n}" max="{self.total}" style="width: 20em"></progress> {escape(str(self))}'
        widths = [max(map(len, column)) for column in zip(columns, *cells)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in (columns, *cells)] if columns else []
        shown = {
            "text/html": bar + (f"<table>{table}</table>" if columns else ""),
            "text/plain": "\n".join([*lines, str(self)]),
        }
        if self._handle is None:
            self._handle = publish(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def add_row(self, row: Mapping[str, str]) -> None:
        """Add a row to the table and show it. `row` maps column names to cell texts."""
        self._rows.append(dict(row))
        self.refresh()

    def close(self) -> None:
        """Close the bar and leave its last state in the notebook."""
        if not self.disable:
            self.refresh()
        super().close()
