"""The report of a run: tables, and charts that the page draws by itself, in one HTML file, from what `observe` wrote.

Nothing here needs torch or the run itself. `report.js` draws the charts, and `follow.js` reloads a live page; `uplot/` holds uPlot as npm publishes it, and the first
line of its script names the version."""
