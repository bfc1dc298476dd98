"""The report of a run as one HTML file, with tables and interactive charts of the records that `observe` wrote.

This package needs neither torch nor the run itself. `report.js` draws the charts, and `follow.js` reloads a live page.
`uplot/` holds uPlot as published on npm; the first line of its script names the version.
"""
