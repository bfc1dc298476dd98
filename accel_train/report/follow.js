// Reloads the page when its runs have written something. What the reader has set stays; the browser keeps the scroll position.
{
  const shown = VERSION;
  const kept = JSON.parse(sessionStorage.getItem("follow") ?? "{}"), drawn = typeof charts === "undefined" ? [] : charts;
  const folds = [...document.querySelectorAll("details")].map((each) => [each.querySelector("summary").firstChild.textContent, each]);
  if (kept.theme) document.documentElement.dataset.theme = kept.theme;
  for (const [name, each] of folds) each.open = kept.open?.[name] ?? each.open;
  for (const chart of drawn) {
    const { log, hidden } = kept.charts?.[chart.spec.name] ?? chart;
    Object.assign(chart, { log, hidden: new Set(hidden) });
    chart.place.parentElement.querySelector(".control").ariaPressed = log;
  }
  const range = document.getElementById("smoothing");
  if (range && kept.smoothing != null) { range.value = kept.smoothing; range.oninput(); }
  for (const { plot } of drawn) if (kept.zoom) plot.setScale("x", kept.zoom);
  const ask = async () => {
    const version = await (await fetch("version")).text();
    if (version === shown) return;
    const x = drawn[0]?.plot.scales.x, steps = drawn[0]?.plot.data[0] ?? [];
    const zoom = x && (x.min > steps[0] || x.max < steps.at(-1)) ? { min: x.min, max: x.max } : null;
    const look = Object.fromEntries(drawn.map(({ spec, log, hidden }) => [spec.name, { log, hidden: [...hidden] }]));
    const open = Object.fromEntries(folds.map(([name, each]) => [name, each.open]));
    const theme = document.documentElement.dataset.theme;
    sessionStorage.setItem("follow", JSON.stringify({ zoom, theme, smoothing: range?.value, charts: look, open }));
    location.reload();
  };
  setInterval(() => ask().catch(() => {}), 2000);
}
