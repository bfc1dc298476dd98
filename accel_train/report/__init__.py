"""The report of a run: charts, tables and one HTML page, drawn from what `observe` wrote.

Nothing here needs torch or the run itself."""
