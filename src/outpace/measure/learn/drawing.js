// Elements, controls and charts of the page.
const SPACE = "http://www.w3.org/2000/svg";
const NARROW = innerWidth < 620; // a picture is as many units wide as it has pixels, so that its text can be read
const WIDE = NARROW ? Math.max(260, innerWidth - 60) : 600;

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(parent, tag, attributes, text) {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function picture(width, height, words) {
  const svg = document.createElementNS(SPACE, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", words);
  return svg;
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
const fixed = (x, digits = 2) => (Number.isFinite(x) ? x.toFixed(digits) : "–");
const percentOf = (x) => `${(100 * x).toFixed(0)} %`;
const ms = (x) => `${x.toFixed(x < 10 ? 2 : 1)} ms`;
const countOf = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** A slider with its value beside it; `show` writes the value. */
function slider(name, { min, max, step = 1, value, show = String }, onMove) {
  const input = make("input", { type: "range", min, max, step, "aria-label": name });
  const output = make("output", {});
  input.value = value;
  const move = () => { output.textContent = show(input.valueAsNumber); onMove(input.valueAsNumber); };
  input.addEventListener("input", move);
  output.textContent = show(input.valueAsNumber);
  return { label: make("label", {}, make("span", {}, name), input, output), input, output, move, get value() { return input.valueAsNumber; } };
}

function chooser(name, options, onMove) {
  const select = make("select", { "aria-label": name }, ...options.map(([value, text]) => make("option", { value }, text)));
  select.addEventListener("change", () => onMove(select.value));
  return { label: make("label", {}, make("span", {}, name), select, make("output")), select, get value() { return select.value; } };
}

/** What a panel says where a run has nothing to show, as with a drafter that found nothing. */
const nothing = (panel) => panel.append(make("p", { class: "quiet" }, "This run has no such step: record it with another drafter."));

const chip = (text, kind = "", tag = "span") => make(tag, { class: `token ${kind}`, ...(tag === "button" ? { type: "button" } : {}) }, visible(text));

function grid(heads, rows, marked = -1) {
  const cell = (value, i) => (i === 0 ? make("th", { scope: "row" }, value) : make("td", {}, value));
  return make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map((row, i) => make("tr", i === marked ? { class: "now" } : {}, ...row.map(cell)))));
}

/** Horizontal bars of several series: `rows` of [name, ...values], each value at most 1. */
function barsOf(rows, series, words) {
  const height = 12 * series.length + 12, svg = picture(WIDE, rows.length * height + 22, words), left = NARROW ? 74 : 130, long = WIDE - left - 62;
  series.forEach(([name, kind], i) => {
    shape(svg, "rect", { class: kind, x: (i * WIDE) / 3, y: 3, width: 10, height: 10 });
    shape(svg, "text", { x: 15 + (i * WIDE) / 3, y: 12 }, name);
  });
  rows.forEach(([name, ...values], r) => {
    const y = 24 + r * height;
    shape(svg, "text", { x: 0, y: y + 6 * series.length + 3, "font-family": "monospace" }, NARROW && name.length > 10 ? `${name.slice(0, 9)}…` : name);
    values.forEach((value, i) => {
      shape(svg, "rect", { class: series[i][1], x: left, y: y + 12 * i, width: Math.max(0, long * value), height: 10 });
      shape(svg, "text", { class: "dim", x: left + 6 + long * value, y: y + 12 * i + 9 }, fixed(value, 3));
    });
  });
  return svg;
}

/** A curve through [x, y] points, with the one at `mark` shown. */
function curveOf(points, mark, { across, up, words, from = 0 }) {
  const svg = picture(WIDE, 220, words);
  const [left, right, top, floor] = [NARROW ? 30 : 52, WIDE - 10, 24, 180];
  const wide = Math.max(...points.map(([x]) => x)), high = Math.max(...points.map(([, y]) => y)) * 1.08;
  const least = Math.min(...points.map(([x]) => x));
  const x = (value) => left + ((right - left) * (value - least)) / (wide - least || 1);
  const y = (value) => floor - ((floor - top) * (value - from)) / (high - from);
  const power = 10 ** Math.floor(Math.log10((high - from) / 3));
  const between = power * [1, 2, 5, 10].find((round) => (high - from) / (round * power) < 6);
  for (let value = from; value <= high; value += between) {
    shape(svg, "line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) });
    shape(svg, "text", { class: "dim", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, fixed(value, between < 1 ? 1 : 0));
  }
  for (const [value] of points.filter((_, i) => points.length < 16 || i % 4 === 0)) shape(svg, "text", { class: "dim", x: x(value), y: floor + 16, "text-anchor": "middle" }, value);
  shape(svg, "path", { class: "curve", d: points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("") });
  const here = points.find(([a]) => a === mark);
  if (here) shape(svg, "circle", { class: "dot", cx: x(here[0]), cy: y(here[1]), r: 5 });
  shape(svg, "text", { x: left, y: 14 }, up);
  shape(svg, "text", { x: right, y: 212, "text-anchor": "end" }, across);
  return svg;
}
