// Draws the charts of a report with uPlot, from the JSON that the page holds, and answers to the page's controls.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const SHAPES = { // around (0, 0), in CSS pixels; for charts and legends
  circle: "M3.2 0A3.2 3.2 0 1 1-3.2 0A3.2 3.2 0 1 1 3.2 0Z",
  square: "M-3.5-3.5H3.5V3.5H-3.5Z",
  diamond: "M0-4.6L4.6 0 0 4.6-4.6 0Z",
  cross: "M-3.5-3.5L3.5 3.5M3.5-3.5L-3.5 3.5",
  up: "M0-4.5L4.5 3.5H-4.5Z",
  down: "M0 4.5L4.5-3.5H-4.5Z",
  left: "M-4.5 0L3.5-4.5V4.5Z",
  right: "M4.5 0L-3.5-4.5V4.5Z",
  peak: "M0-5V5M-3.5-1.5L0-5 3.5-1.5",
};
const HOLLOW = new Set(["circle", "diamond"]);
const DASHES = [[], [7, 4], [2, 3], [7, 3, 2, 3]]; // a seventh run takes the first colour again, dashed
const FONT = '12px Inter, "Helvetica Neue", "Segoe UI", system-ui, Roboto, "Liberation Sans", Arial, sans-serif';
let smoothing = 4; // the slider: 0 is none, and each step doubles the width

const plain = (value, digits = 6) => Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 9 });
const scientific = (value) => Number(value.toPrecision(5)).toExponential().replace("e+", "e");
const number = (value) => value && Math.abs(value) < 1e-3 ? scientific(value) : plain(value, 5);

/** Labels in one notation for the whole axis: 0.0008 and 0.0016, 2k and 4k, or 3e-5 and 1e-4. */
function labels(ticks, exact) {
  const sizes = ticks.filter((tick) => tick).map(Math.abs);
  const low = Math.min(...sizes), high = Math.max(...sizes);
  if (high < 1e-3 || (low < 1e-3 && high > 1e3 * low)) {
    return ticks.map((tick) => tick ? scientific(tick) : "0");
  }
  const suffix = (size) => [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]].find(([, factor]) => size >= factor) ?? ["", 1];
  return ticks.map((tick) => {
    const [unit, factor] = exact || high < 1e4 ? ["", 1] : suffix(high > 1e3 * low ? Math.abs(tick) : high);
    return tick ? plain(tick / factor, exact ? 15 : 6) + unit : "0";
  });
}

function linearTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= 0.999 * raw);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

function logTicks(low, high, base) {
  if (base === 10 && high < 4 * low) return linearTicks(low, high, 5);
  const log = (value) => Math.log(value) / Math.log(base);
  const parts = base === 2 || high > 300 * low ? [1] : high < 12 * low ? [1, 1.5, 2, 3, 4, 6, 8] : [1, 3];
  const every = parts.length > 1 ? 1 : Math.max(1, Math.ceil((log(high) - log(low)) / 7));
  const ticks = [];
  for (let power = Math.floor(log(low)); power <= log(high); power++) {
    if (power % every === 0) ticks.push(...parts.map((part) => Number((part * base ** power).toPrecision(12))));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

/** The level of a straight line fitted around each value, weighted by a Gaussian of `width`: no lag, no bend at the ends. */
function smooth(values, width) {
  const reach = Math.min(values.length, Math.ceil(4 * width));
  const weights = Array.from({ length: reach + 1 }, (_, k) => Math.exp(-0.5 * (k / width) ** 2));
  return values.map((_, i) => {
    let s0 = 0, s1 = 0, s2 = 0, m0 = 0, m1 = 0;
    for (let j = Math.max(0, i - reach); j <= Math.min(values.length - 1, i + reach); j++) {
      const k = j - i, weight = weights[Math.abs(k)];
      s0 += weight; s1 += weight * k; s2 += weight * k * k;
      m0 += weight * values[j]; m1 += weight * k * values[j];
    }
    return (s2 * m0 - s1 * m1) / (s0 * s2 - s1 * s1);
  });
}

function interpolate(xs, ys, x) {
  const right = xs.findIndex((each) => each >= x);
  if (right < 1) return right === 0 ? ys[0] : ys.at(-1);
  const share = (x - xs[right - 1]) / (xs[right] - xs[right - 1]);
  return ys[right - 1] + share * (ys[right] - ys[right - 1]);
}

/** Every line and kind of mark of a chart: `key` is its entry of the legend, which several of them may share. */
function layers(chart) {
  const { spec, log } = chart, alone = page.runs.length === 1, found = [], edges = []; // edges: drawn last, over the lines
  const shown = (x, y) => log ? [x.filter((_, n) => y[n] > 0), y.filter((value) => value > 0)] : [x, y];
  let curve = [[], []];
  for (const each of spec.curves) {
    const at = each.color ?? each.run, color = `--series-${at % 6 + 1}`, dash = DASHES[Math.floor(at / 6) % DASHES.length];
    let [x, y] = shown(each.x, each.y);
    const look = { color, dash, width: 1.8, stairs: spec.stairs }, raw = { ...look, key: each.name ?? (alone ? spec.each : page.runs[each.run]), x, y };
    if (each.smooth && smoothing && y.length > 2) {
      const alpha = (isDark() ? 0.65 : 0.5) * (y.length > 1000 ? 0.5 : 1); // the trend stands out from many lines
      found.push({ ...raw, dash: [], width: 1, alpha, name: `${raw.key}${alone ? "" : ", each log line"}` });
      [x, y] = shown(each.mean_x ?? x, each.mean_y ?? y);
      const level = smooth(log ? y.map(Math.log) : y, Math.max(1, y.length / 90) * 2 ** (smoothing - 4));
      found.push({ ...look, key: alone ? "trend" : raw.key, x, y: log ? level.map(Math.exp) : level });
    } else {
      found.push({ ...raw, shape: y.length === 1 || (spec.group === "evaluation" && y.length <= 20) ? "circle" : null });
    }
    curve = [x, found.at(-1).y];
    const off = [
      ["NaN or Inf", "up", 1, each.up, each.num_up], ["−Inf", "down", 0, each.down, each.num_down],
      ["zero or less", "down", 0, log ? each.x.filter((_, n) => each.y[n] <= 0) : []],
      ["above the axis", "peak", 1, log || spec.ceiling == null ? [] : each.x.filter((_, n) => each.y[n] > spec.ceiling)],
    ];
    for (const [key, shape, edge, x, count] of off.filter((each) => each[3].length)) {
      edges.push({ key, shape, color: alone ? "--alert" : color, edge: true, x, y: x.map(() => edge), count: count ?? (each.thinned ? 0 : x.length) });
    }
  }
  for (const each of spec.evaluations) {
    const [x, y] = shown(each.x, each.y), key = alone ? "evaluation" : page.runs[each.run];
    found.push({ key, name: alone ? key : `${key}, evaluation`, x, y, shape: "diamond", width: alone ? 1 : 0, color: `--series-${alone ? 2 : each.run % 6 + 1}` });
  }
  for (const { label: key, color, shape, x, num_x: count } of spec.marks) {
    const edge = shape.endsWith("line"), dash = { "dashed line": [5, 4], "dotted line": [2, 3] }[shape];
    const y = x.map((step) => edge ? 1 : interpolate(...curve, step));
    if (edge || curve[0].length) edges.push({ key, color, shape, dash, edge, x, y, count });
  }
  return [...found, ...edges.map((each) => ({ ...each, mark: true }))];
}

const probe = document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function colorOf(name) { // a canvas takes no CSS variable
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** A builder of paths, as uPlot takes it, that draws a shape at each point, or a line across the chart. */
const shapesOf = ({ shape, edge, x: { length } }) => (plot, at, first, last) => {
  const path = new Path2D(), ratio = devicePixelRatio, { top, height } = plot.bbox, [xs, ys] = [plot.data[0], plot.data[at]];
  const outline = SHAPES[shape] && new Path2D(SHAPES[shape]), size = ratio * (length > 40 ? 0.7 : 1);
  for (let n = first; n <= last; n++) {
    if (ys[n] == null) continue;
    const x = plot.valToPos(xs[n], "x", true);
    if (outline) {
      const y = edge ? top + (ys[n] ? 7 * ratio : height - 7 * ratio) : plot.valToPos(ys[n], "y", true);
      path.addPath(outline, new DOMMatrix([size, 0, 0, size, x, y]));
    } else {
      path.moveTo(x, top);
      path.lineTo(x, top + height);
    }
  }
  return { stroke: path, fill: path, flags: 0 };
};

function seriesOf(layer) {
  const { shape, edge, width, alpha, stairs } = layer, color = colorOf(layer.color), paper = colorOf("--paper");
  const fill = HOLLOW.has(shape) ? paper : color;
  const common = { label: layer.name ?? layer.key, stroke: color, scale: edge ? "edge" : "y", alpha: alpha ?? 1, dash: layer.dash, points: { show: false } };
  if (layer.mark) return { ...common, width: 1.6, fill, paths: shapesOf(layer), class: "mark" };
  const drawn = stairs ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
  const points = { show: Boolean(shape), paths: shape && shapesOf(layer), stroke: color, width: 1.4, fill };
  return { ...common, width, paths: width ? drawn : () => null, points };
}

function yRange(chart, plot, low, high) {
  const { spec, log } = chart;
  if (low == null) return log ? [1, 10] : [0, 1];
  if (log) {
    const span = Math.max(Math.log(high / low), 0.1), pad = Math.exp(0.05 * span);
    return high > low ? [low / pad, high * pad] : [low / 2, high * 2];
  }
  const top = spec.ceiling == null ? high : Math.min(high, spec.ceiling);
  const pad = 0.05 * (top - low) || Math.abs(top) / 10 || 1;
  return [spec.from_zero && low >= 0 ? 0 : low - pad, spec.ceiling != null && high > spec.ceiling ? top : top + pad];
}

const heightOf = (spec, width) => !spec.across ? (spec.is_first ? 300 : 230) : width > 560 ? 370 : 300;

function optionsOf(chart, width) {
  const { spec, log, layers } = chart, base = spec.scale === "log2" ? 2 : 10;
  const muted = colorOf("--muted"), line = colorOf("--line"), isMark = (at) => layers[at - 1]?.mark;
  const axis = { stroke: muted, font: FONT, ticks: { show: false }, filter: (_, ticks) => ticks };
  return {
    width, height: heightOf(spec, width), padding: [8, 20, 0, 0], legend: { show: false },
    cursor: {
      y: false, drag: { x: true, y: false, dist: 5 }, sync: { key: "step", scales: ["x", null], setSeries: false },
      hover: { skip: [null], prox: (_, at) => isMark(at) ? 12 : null }, points: { size: 7 },
    },
    scales: {
      x: { time: false, range: xRange },
      y: { distr: log ? 3 : 1, log: base, range: (plot, low, high) => yRange(chart, plot, low, high) },
      edge: { auto: false, range: [0, 1] },
    },
    axes: [
      {
        ...axis, size: 28, gap: 8, grid: { show: false }, border: { show: true, stroke: line, width: 1 },
        splits: (plot, _, low, high) => linearTicks(low, high, Math.min(8, width / 85)).filter(Number.isInteger),
        values: (_, ticks) => labels(ticks),
      },
      {
        ...axis, gap: 8, grid: { stroke: line, width: 1 }, size: (_, texts) => 16 + 7 * Math.max(3, ...(texts ?? []).map((text) => text.length)),
        splits: (_, __, low, high) => log ? logTicks(low, high, base) : linearTicks(low, high, 5),
        values: (_, ticks) => labels(ticks, base === 2),
      },
    ],
    series: [{ label: "step" }, ...layers.map(seriesOf)],
    hooks: { setCursor: [() => showValues(chart)] },
  };
}

function xRange({ data: [xs] }, low, high) {
  if (low == null) return [0, 1];
  if (low === high) return [low - 1, high + 1];
  const pad = low === xs[0] && high === xs.at(-1) ? 0.012 * (high - low) : 0; // marks at the ends are whole
  return [low - pad, high + pad];
}

/** Draw a chart, again after a change of theme, scale or smoothing: the zoom and what is hidden stay. */
function draw(chart) {
  const before = chart.plot?.scales.x;
  chart.plot?.destroy();
  chart.layers = layers(chart);
  const tables = chart.layers.map(({ x, y }) => [x, y]);
  chart.plot = new uPlot(optionsOf(chart, chart.place.clientWidth), uPlot.join(tables), chart.place);
  if (before?.min != null) chart.plot.setScale("x", { min: before.min, max: before.max });
  drawLegend(chart);
}

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Draw how a layer looks, 20 pixels wide: for legends and pictures. */
function drawSample(context, { color, shape, width, dash, alpha, mark }, x, y) {
  const path = new Path2D(), place = new DOMMatrix([1, 0, 0, 1, x + 10, y]);
  for (const part of [width ? "M-10 0H10" : "", SHAPES[shape] ?? (mark ? "M0-6V6" : "")]) path.addPath(new Path2D(part), place);
  const fillStyle = colorOf(HOLLOW.has(shape) ? "--paper" : color);
  Object.assign(context, { strokeStyle: colorOf(color), fillStyle, lineWidth: 1.6, globalAlpha: alpha ?? 1 });
  context.setLineDash(dash ?? []);
  context.stroke(path);
  context.fill(path);
  context.globalAlpha = 1;
}

function sampleOf(layer) {
  const canvas = make("canvas", { width: 20 * devicePixelRatio, height: 12 * devicePixelRatio }), context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  drawSample(context, layer, 0, 6);
  return canvas;
}

function drawLegend(chart) {
  const keys = [...new Set(chart.layers.map((layer) => layer.key))];
  chart.values = new Map([[null, make("output")]]);
  chart.legend.replaceChildren();
  for (const key of keys) {
    const parts = chart.layers.filter((layer) => layer.key === key), main = parts.find((part) => part.width > 1) ?? parts[0];
    const count = parts.reduce((sum, part) => sum + (part.count ?? 0), 0);
    const value = make("output", { className: main.mark ? "" : "value" });
    const button = make("button", { type: "button", title: "show or hide" }, sampleOf(main), count > 1 ? `${key} ×${count.toLocaleString("en")}` : key, value);
    const show = () => {
      button.ariaPressed = !chart.hidden.has(key);
      chart.layers.forEach((layer, n) => layer.key === key && chart.plot.setSeries(n + 1, { show: !chart.hidden.has(key) }));
    };
    button.onclick = () => { chart.hidden.delete(key) || chart.hidden.add(key); show(); };
    chart.values.set(key, value);
    chart.legend.append(button);
    show();
  }
  chart.legend.append(make("span", { className: "step" }, "step ", chart.values.get(null)));
}

function showValues({ plot, values, layers }) {
  if (!plot || !values) return;
  const { idx, idxs } = plot.cursor, stepAt = (at) => plain(plot.data[0][at], 15);
  const found = new Map([[null, idx == null ? "" : stepAt(idx)]]);
  layers.forEach((layer, n) => {
    const at = idxs[n + 1];
    if (idx == null || at == null) return;
    if (layer.mark) found.set(layer.key, ` at ${stepAt(at)}`);
    else if (!layer.alpha || !found.has(layer.key)) found.set(layer.key, number(plot.data[n + 1][at])); // the trend rather than a single line
  });
  values.forEach((output, key) => { output.textContent = found.get(key) ?? ""; });
}

function save(blob, chart, suffix) {
  const link = make("a", { href: URL.createObjectURL(blob), download: `${page.title}-${chart.spec.name}.${suffix}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function csvOf({ plot: { data, series } }) {
  const quoted = (text) => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  const rows = data[0].map((step, n) => [step, ...data.slice(1).map(({ [n]: value }) => value == null ? "" : Number(value.toPrecision(6)))].join(","));
  return [series.map(({ label }) => quoted(label)).join(","), ...rows].join("\n") + "\n";
}

function pictureOf({ plot, spec, layers, hidden }) {
  const ratio = devicePixelRatio, canvas = make("canvas"), context = canvas.getContext("2d");
  context.font = FONT;
  let [x, y] = [16, plot.height + 54];
  const entries = [...new Map(layers.filter(({ key }) => !hidden.has(key)).map((layer) => [layer.key, layer]))].map(([key, layer]) => {
    const width = context.measureText(key).width + 44;
    if (x > 16 && x + width > plot.width) [x, y] = [16, y + 20];
    x += width;
    return [key, layer, x - width, y];
  });
  [canvas.width, canvas.height] = [(plot.width + 16) * ratio, (y + 20) * ratio];
  context.fillStyle = colorOf("--paper");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(plot.ctx.canvas, 8 * ratio, 36 * ratio);
  context.scale(ratio, ratio);
  const write = (text, font, ...place) => { Object.assign(context, { font, fillStyle: colorOf("--ink-soft") }); context.fillText(text, ...place); };
  write(spec.title, `600 ${FONT.replace("12px", "14px")}`, 16, 24);
  for (const [key, layer, x, y] of entries) {
    drawSample(context, layer, x, y);
    write(key, FONT, x + 26, y + 4);
  }
  return canvas;
}

function start(figure) {
  const spec = page.charts[figure.dataset.chart];
  const chart = { spec, log: spec.scale !== "linear", hidden: new Set(), place: make("div", { className: "plot" }), legend: make("div", { className: "legend" }) };
  const control = (text, title, onclick) => make("button", { type: "button", className: "control", title, onclick }, text);
  const log = control("log", "switch between a logarithmic and a linear axis", () => {
    chart.log = !chart.log;
    log.ariaPressed = chart.log;
    draw(chart);
  });
  log.ariaPressed = chart.log;
  const csv = control("CSV", "download the values", () => save(new Blob([csvOf(chart)], { type: "text/csv" }), chart, "csv"));
  const png = control("PNG", "download the picture", () => pictureOf(chart).toBlob((blob) => save(blob, chart, "png")));
  figure.append(make("figcaption", {}, make("h3", {}, spec.title), log, csv, png), chart.place, chart.legend);
  draw(chart);
  return chart;
}

const charts = [...document.querySelectorAll("figure[data-chart]")].map(start);
const redraw = () => charts.forEach(draw);

const theme = document.getElementById("theme");
const nameTheme = () => { theme.textContent = isDark() ? "light" : "dark"; };
theme.onclick = () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); redraw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { nameTheme(); redraw(); });
nameTheme();

const slider = document.getElementById("smoothing");
slider.oninput = () => { smoothing = Number(slider.value); redraw(); };
for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;
if (!charts.some(({ layers }) => layers.some((layer) => layer.alpha))) slider.parentElement.hidden = true;

new ResizeObserver(() => charts.forEach(({ plot, place, spec }) => {
  const width = place.clientWidth;
  if (width && width !== plot.width) plot.setSize({ width, height: heightOf(spec, width) });
})).observe(document.querySelector("main"));
