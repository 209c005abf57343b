// Long because the page is one file on purpose: no framework, no build step, nothing to fetch.
// Reads the trace (docs/traces.md) that stands in the page as JSON, and draws the answer and the step under the cursor.
const SVG = "http://www.w3.org/2000/svg";
const PHASES = { draft: 1, target: 0, verify: 2, other: 3 }; // phase -> colour
const BLOCK = 240; // tokens a block of text, at least: blocks out of sight are not laid out, and long ones slowly
const at = (id) => document.getElementById(id);

// -- reading -----------------------------------------------------------------------------------------------------------

/** The trace as answers, one a sample, each with its tokens and its steps. `data.sources`: drafters that have colours already. */
function readTrace(data) {
  const trace = { ...data, requests: new Map(), texts: new Map(), answers: [], sources: [...(data.sources || [])] };
  const answers = new Map();
  const answer = (request, sample) => {
    const key = `${request}/${sample}`;
    if (!answers.has(key)) {
      answers.set(key, { request, sample, steps: [], tokens: [], result: null, prefill: 0 });
      trace.answers.push(answers.get(key));
    }
    return answers.get(key);
  };
  for (const line of data.lines) {
    if (line.request) trace.requests.set(line.request.id, line.request);
    else if (line.texts) for (const [id, text] of line.texts) trace.texts.set(id, text);
    else if (line.result) answer(line.result.request, line.result.sample).result = line.result;
    else if (line.margins) answer(line.q, line.n || 0).margins = line.margins;
    else if (line.step !== undefined) {
      const seconds = Object.values(line.s).reduce((a, b) => a + b, 0);
      for (const [request, sample] of line.c || []) answer(request, sample).prefill += seconds;
      for (const row of line.r) answer(row.q, row.n || 0).steps.push(readRow(row, line, seconds));
    }
  }
  trace.answers.sort((a, b) => a.request - b.request || a.sample - b.sample);
  for (const one of trace.answers) collect(one, trace);
  return trace;
}

/** A row of a step with everything spelled out that the file leaves to be assumed. */
function readRow(row, line, seconds) {
  const tokens = row.t || [];
  const names = row.o || ["draft"];
  const path = row.h || [];
  return {
    tokens, path, line, seconds,
    parents: row.p || tokens.map((_, i) => i - 1),
    confidence: row.c && row.c.some((c) => Number.isFinite(Number(c))) ? row.c.map(Number) : [],
    worth: (row.u || []).map(Number),
    sources: tokens.map((_, i) => names[row.s ? row.s[i] : 0]),
    kept: new Set(row.k || tokens.keys()),
    verdict: row.v,
    gained: row.g ?? row.v.length,
    nearTies: row.m || 0,
    size: row.z ?? (row.k ? row.k.length : tokens.length),
    expected: row.e === undefined ? null : Number(row.e),
    why: row.y || "",
    start: row.a, row: row.w,
    p: (row.P || []).map(Number), q: (row.Q || []).map(Number), places: readPlaces(row),
  };
}

/** The answer's tokens, and who is who in the trace. */
function collect(answer, trace) {
  const pieces = answer.result ? answer.result.pieces : [];
  answer.steps.forEach((step, i) => {
    step.from = answer.tokens.length;
    step.verdict.slice(0, step.gained).forEach((id, j) => {
      const source = j < step.path.length ? step.sources[step.path[j]] : "target";
      const n = answer.tokens.length;
      answer.tokens.push({ id, source, step: i, text: pieces.length ? pieces[n] ?? "" : spelled(trace, id) });
    });
    for (const source of step.sources) if (!trace.sources.includes(source)) trace.sources.push(source);
  });
}

const spelled = (trace, id) => trace.texts.get(id) ?? `[${id}]`;

// -- small things ------------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function draw(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const percent = (share) => (Number.isFinite(share) ? `${Math.round(100 * share)} %` : "–");
const milliseconds = (s) => `${(1e3 * s).toFixed(s < 0.01 ? 2 : 1)} ms`;
const rounded = (x, digits = 2) => (Number.isFinite(x) ? x.toFixed(digits) : "–");
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const colour = (trace, source) => (source === "target" ? "t" : String(trace.sources.indexOf(source) % 6));

/** What would be invisible, or would change what is around it: controls, half characters, direction marks, tags. Joiners
    of emoji are not among them. */
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200c\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\p{Cs}\u{e0000}-\u{e007f}]/u;

function codeName(character) {
  const code = character.codePointAt(0);
  return code < 32 ? String.fromCharCode(0x2400 + code) : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A token by itself, with spaces and what is unseen made visible. */
function label(text, longest = 24) {
  const visible = { " ": "␣", "\n": "⏎", "\t": "⇥" };
  const shown = Array.from(text, (c) => visible[c] || (UNSEEN.test(c) || text === "\u200d" ? codeName(c) : c));
  return shown.length > longest ? shown.slice(0, longest - 1).join("") + "…" : shown.join("");
}

/** A token quoted in a sentence, whichever way it is written. */
const quoted = (text) => `“\u2068${label(text)}\u2069”`;

/** A token within the text: as it is, but what is unseen is shown as its code. */
function fill(span, text) {
  if (!UNSEEN.test(text)) {
    span.textContent = text;
    return;
  }
  for (const c of text) span.append(UNSEEN.test(c) ? element("span", { class: "code" }, codeName(c)) : c);
}

// -- the answer ----------------------------------------------------------------------------------------------------------

/** Spans of tokens in blocks that end where a line does, so that cutting the text into blocks does not show; in a text
    that has no lines, between words. */
function renderPieces(into, texts, decorate) {
  into.replaceChildren();
  const spans = [];
  let block = element("div", { dir: "auto" });
  texts.forEach((text, i) => {
    const span = document.createElement("span");
    fill(span, text);
    if (decorate) decorate(span, i);
    spans.push(span);
    block.append(span);
    const n = block.childElementCount;
    if (n >= BLOCK && (text.endsWith("\n") || (n >= 4 * BLOCK && text.endsWith(" ")) || n >= 8 * BLOCK)) {
      into.append(block);
      block = element("div", { dir: "auto" });
    }
  });
  into.append(block);
  into.classList.toggle("many", into.childElementCount > 12);
  return spans;
}

function renderAnswer() {
  const { trace, answer } = state;
  const request = trace.requests.get(answer.request);
  const prompt = request && request.pieces;
  at("prompt").hidden = !prompt;
  if (prompt) {
    at("prompt").firstElementChild.textContent = `Prompt, ${plural(request.prompt.length, "token")}`;
    renderPieces(at("prompt").lastElementChild, prompt);
  }
  state.spans = renderPieces(at("pieces"), answer.tokens.map((token) => token.text), (span, i) => {
    const source = answer.tokens[i].source;
    if (source !== "target") span.className = `s${colour(trace, source)}`;
    span.dataset.i = i;
  });
  if (!answer.tokens.length) at("pieces").append(element("p", { class: "quiet" }, "It has no tokens."));
  at("text").scrollTop = 0;
}

function renderLegend() {
  const met = state.trace.sources.filter((source) =>
    state.trace.answers.some((answer) => answer.steps.some((step) => step.sources.includes(source))));
  const items = met.map((source) =>
    element("li", {}, element("span", { class: `s${colour(state.trace, source)}` }, source)));
  at("legend").replaceChildren(element("li", {}, "target"), ...items);
}

function renderList() {
  const { trace } = state;
  const items = trace.answers.map((answer, i) => {
    const request = trace.requests.get(answer.request);
    const sample = request && request.params.n > 1 ? `, sample ${answer.sample + 1}` : "";
    const told = answer.result && answer.result.error ? "error" : answer.result ? answer.result.finish_reason : "did not end";
    const button = element("button", { type: "button" },
      element("b", { dir: "auto" }, opening(trace, answer)),
      element("span", { class: "quiet" }, `${answer.request + 1}${sample} · ${plural(answer.tokens.length, "token")} · ${told}`));
    button.onclick = () => chooseAnswer(i);
    return element("li", {}, button);
  });
  at("list").replaceChildren(...items);
  at("answers").hidden = items.length < 2;
}

/** How an answer begins: what tells it from others in the list. */
function opening(trace, answer) {
  const text = answer.tokens.slice(0, 24).map((token) => token.text).join("").trim();
  return label(text.replace(/\s+/g, " "), 60).replaceAll("␣", " ") || "(no text)";
}

function renderFigures() {
  const { trace, answer } = state;
  const request = trace.requests.get(answer.request);
  const total = totals(answer.steps);
  const stats = (answer.result && answer.result.stats) || {};
  const rows = [
    ["Tokens", answer.tokens.length.toLocaleString("en")],
    ["Steps", answer.steps.length.toLocaleString("en")],
    ["Tokens a step", rounded(total.gained / answer.steps.length)],
    ["Accepted", total.verified ? `${percent(total.accepted / total.verified)} of ${total.verified.toLocaleString("en")}` : "nothing was drafted"],
    ["Tokens/s", rounded(stats.decode_tokens_per_second || total.gained / total.seconds, 1)],
  ];
  if (answer.prefill) rows.push(["Prefill steps took", milliseconds(answer.prefill)]);
  if (stats.time_to_first_token) rows.push(["First token after", milliseconds(stats.time_to_first_token)]);
  if (answer.result) rows.push(["Ended by", ended(answer.result)]);
  if (request) {
    rows.push(["Seed", String(request.seed)], ["Acceptance", request.acceptance]);
    rows.push(["Size", request.adaptive ? `auto, at most ${request.size}` : String(request.size)]);
    for (const [name, value] of asked(request)) rows.push([name, value]);
  }
  const tables = [table(null, rows)];
  if (trace.sources.length) tables.push(table(["Drafter", "verified", "accepted"], bySource(answer)));
  const depths = byDepth(answer);
  if (depths.length) tables.push(table(["Depth", "drafts", "accepted"], depths));
  const notes = answer.result ? [...(answer.result.notes || []), ...(answer.result.error ? [answer.result.error] : [])] : [];
  at("figures").replaceChildren(...tables, ...notes.map((note) => element("p", {}, note)));
}

function table(head, rows) {
  const made = element("table");
  if (head) made.append(element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))));
  made.append(element("tbody", {}, ...rows.map(([name, ...values]) =>
    element("tr", {}, element("th", { scope: "row" }, name), ...values.map((value) => element("td", {}, value))))));
  return made;
}

const ended = (result) => result.finish_reason + (result.stopped_by === null ? "" : ` (${label(String(result.stopped_by))})`);

/** Parameters that change the distribution. */
function asked({ params, changed }) {
  const spread = params.temperature ? ["Temperature", String(params.temperature)] : ["Temperature", "0, greedy"];
  return [spread, ...Object.entries(changed).map(([name, value]) => [name.replaceAll("_", "-"), String(value)])];
}

/** Pooled counts of some steps. */
function totals(steps) {
  const sum = { gained: 0, verified: 0, accepted: 0, seconds: 0 };
  for (const step of steps) {
    sum.gained += step.gained;
    sum.verified += step.kept.size;
    sum.accepted += Math.min(step.path.length, step.gained);
    sum.seconds += step.seconds;
  }
  return sum;
}

function bySource(answer) {
  const verified = new Map(), accepted = new Map();
  const count = (map, key) => map.set(key, (map.get(key) || 0) + 1);
  for (const step of answer.steps) {
    for (const node of step.kept) count(verified, step.sources[node]);
    for (const node of step.path.slice(0, step.gained)) count(accepted, step.sources[node]);
  }
  return [...verified].map(([source, n]) => [source, n.toLocaleString("en"), percent((accepted.get(source) || 0) / n)]);
}

/** Of the drafts that reached a depth, how many were accepted that far; at most eight depths. */
function byDepth(answer) {
  const drafts = [], accepted = [];
  for (const step of answer.steps) {
    const depth = [];
    step.parents.forEach((parent, node) => (depth[node] = parent < 0 ? 0 : depth[parent] + 1));
    const deepest = Math.max(-1, ...[...step.kept].map((node) => depth[node]));
    for (let d = 0; d <= deepest; d++) {
      drafts[d] = (drafts[d] || 0) + 1;
      accepted[d] = (accepted[d] || 0) + (d < Math.min(step.path.length, step.gained) ? 1 : 0);
    }
  }
  return drafts.slice(0, 8).map((n, d) => [String(d + 1), n.toLocaleString("en"), percent(accepted[d] / n)]);
}

// -- charts ----------------------------------------------------------------------------------------------------------------

const CHARTS = [
  { name: "tokens a step", value: (t, n) => t.gained / n, show: (x) => rounded(x, 2) },
  { name: "accepted", value: (t) => (t.verified ? t.accepted / t.verified : NaN), show: percent, top: 1 },
  { name: "tokens/s", value: (t) => (t.seconds ? t.gained / t.seconds : NaN), show: (x) => rounded(x, 0) },
];
const CHART = { height: 46, left: 136, right: 6, pad: 4 };

/** Steps in at most ``most`` groups of equal size: what is drawn of 10,000 steps. */
function buckets(steps, most) {
  const size = Math.max(1, Math.ceil(steps.length / most));
  const groups = [];
  for (let i = 0; i < steps.length; i += size) {
    const group = steps.slice(i, i + size);
    groups.push({ totals: totals(group), count: group.length });
  }
  return { size, groups };
}

function renderCharts() {
  const width = Math.max(220, at("charts").clientWidth);
  const steps = state.answer.steps;
  const span = width - CHART.left - CHART.right;
  const { size, groups } = buckets(steps, Math.floor(span / 3));
  const x = (step) => CHART.left + (span * step) / Math.max(1, steps.length);
  state.chart = { x, width, marks: [], steps: steps.length };
  at("charts").replaceChildren();
  for (const chart of CHARTS) {
    const values = groups.map((group) => chart.value(group.totals, group.count));
    const highest = chart.top || Math.max(1e-9, ...values.filter(Number.isFinite)) * 1.08;
    const svg = draw(at("charts"), "svg", { viewBox: `0 0 ${width} ${CHART.height}`, height: CHART.height, role: "img" });
    const all = chart.value(totals(steps), steps.length);
    svg.setAttribute("aria-label", `${chart.name} over the answer: ${chart.show(all)} on the whole`);
    const y = (value) => CHART.height - CHART.pad - (CHART.height - 2 * CHART.pad) * Math.min(1, value / highest);
    const floor = CHART.height - CHART.pad;
    draw(svg, "line", { class: "floor", x1: CHART.left, x2: width - CHART.right, y1: floor, y2: floor });
    const { area, curve } = outline(values, (i) => x(Math.min(steps.length, i * size)), y, floor);
    draw(svg, "path", { class: "area", d: area });
    draw(svg, "path", { class: "curve", d: curve });
    draw(svg, "text", { class: "small end", x: CHART.left - 6, y: CHART.pad + 8 }, chart.show(highest));
    draw(svg, "text", { class: "small end", x: CHART.left - 6, y: floor }, "0");
    draw(svg, "text", { x: 0, y: 17 }, chart.name);
    const said = draw(svg, "text", { class: "small", x: 0, y: 34 });
    const mark = draw(svg, "line", { class: "mark", y1: 0, y2: CHART.height });
    const dot = draw(svg, "circle", { class: "dot", r: 4 });
    state.chart.marks.push({ mark, dot, said, y, values, size, floor, chart });
    scrub(svg);
  }
  renderSteps(x, width, steps.length);
}

/** The axis below the charts: numbers of steps. */
function renderSteps(x, width, n) {
  const svg = draw(at("charts"), "svg", { viewBox: `0 0 ${width} 16`, height: 16, "aria-hidden": "true" });
  draw(svg, "text", { class: "small", x: 0, y: 12 }, "step");
  for (const step of [...new Set([1, Math.round(n / 4), Math.round(n / 2), Math.round((3 * n) / 4), n])].filter((s) => s > 0)) {
    const end = step === n && n > 1 ? " end" : "";
    draw(svg, "text", { class: `small${end}`, x: end ? width - CHART.right : x(step - 1), y: 12 }, step.toLocaleString("en"));
  }
}

/** A staircase over the groups' values, with gaps where there is none. */
function outline(values, x, y, floor) {
  let area = "", curve = "";
  let open = false;
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) {
      if (open) area += `V${floor}Z`;
      open = false;
      return;
    }
    const [a, b, h] = [x(i).toFixed(1), x(i + 1).toFixed(1), y(value).toFixed(1)];
    area += open ? `V${h}H${b}` : `M${a} ${floor}V${h}H${b}`;
    curve += open ? `V${h}H${b}` : `M${a} ${h}H${b}`;
    open = true;
  });
  return { area: open ? `${area}V${floor}Z` : area, curve };
}

function moveMarks() {
  const { x, marks } = state.chart;
  const middle = x(state.at + 0.5);
  for (const { mark, dot, said, y, values, size, floor, chart } of marks) {
    mark.setAttribute("x1", middle);
    mark.setAttribute("x2", middle);
    const value = values[Math.floor(state.at / size)];
    dot.setAttribute("cx", middle);
    dot.setAttribute("cy", Number.isFinite(value) ? y(value) : floor);
    dot.toggleAttribute("hidden", !Number.isFinite(value));
    said.textContent = chart.show(value) + (size > 1 ? `, ${size} steps` : "");
  }
}

function scrub(svg) {
  const to = (event) => {
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * state.chart.width - CHART.left;
    chooseStep(Math.floor((inside / (state.chart.width - CHART.left - CHART.right)) * state.chart.steps));
  };
  svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); state.held = true; to(event); });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) to(event); });
}

// -- the step ----------------------------------------------------------------------------------------------------------------

/** Why so much was drafted, and what came of it, in words. */
function reasons(step, trace) {
  const k = step.tokens.length, kept = step.kept.size, a = step.path.length;
  const because = step.why ? `: ${step.why}` : "";
  const names = [...new Set(step.sources)].join(" and ");
  let drafted;
  if (!k) drafted = `Nothing was drafted${because || " (no reason was recorded)"}.`;
  else if (!kept) drafted = `${names} proposed ${plural(k, "token")}, and none was verified${because}.`;
  else if (kept < k) drafted = `${names} proposed ${plural(k, "token")}; ${kept} of them were verified${because}.`;
  else drafted = `${names} proposed ${plural(k, "token")}; all were verified${because}.`;
  const hoped = step.expected === null ? "" : ` The policy expected ${rounded(step.expected)} times plain decoding's speed.`;
  const last = quoted(spelled(trace, step.verdict[step.verdict.length - 1]));
  const outcome = !kept ? ` The target wrote ${last}.`
    : a ? ` The target agreed with ${a} and added ${last} (${closing(step)}).`
    : ` The target disagreed at once and wrote ${last} (${closing(step)}).`;
  const cut = step.gained < step.verdict.length ? ` The answer ended before the last ${step.verdict.length - step.gained}.` : "";
  const near = step.nearTies ? ` ${plural(step.nearTies, "near-tie")}: another order of sums might have chosen otherwise.` : "";
  return drafted + hoped + (step.verdict.length ? outcome : "") + cut + near;
}

/** What the target's own token is called: recovered after a disagreement, bonus after full agreement. */
function closing(step) {
  if (!step.kept.size) return "plain";
  const last = step.path.length ? step.path[step.path.length - 1] : -1;
  return [...step.kept].some((node) => step.parents[node] === last) ? "recovered" : "bonus";
}

/** The tree line by line: what was committed goes straight down in lane 0, everything else hangs off it to the right. */
function layout(step) {
  const children = new Map();
  step.parents.forEach((parent, node) => children.set(parent, [...(children.get(parent) || []), node]));
  const lines = [];
  const visit = (node, lane, parent) => {
    const index = lines.push({ node, lane, parent, kind: kind(step, node) }) - 1;
    const kids = children.get(node) || [];
    const trunk = lines[index].kind === "accepted" || node === -1;
    const onward = trunk ? kids.find((kid) => step.path.includes(kid)) : kids[0];
    for (const kid of kids) if (kid !== onward) visit(kid, lane + 1, index);
    if (onward !== undefined) visit(onward, lane, index);
    else if (trunk && step.verdict.length) lines.push({ node: null, lane, parent: index, kind: "target" });
  };
  visit(-1, 0, null);
  return lines;
}

function kind(step, node) {
  if (node === -1) return "pending";
  if (step.path.includes(node)) return step.path.indexOf(node) < step.gained ? "accepted" : "cut off";
  return step.kept.has(node) ? "rejected" : "dropped";
}

const LINE = 25, LANE = 15;

function renderTree(step) {
  const { trace, answer } = state;
  const lines = layout(step);
  const width = Math.max(280, at("tree").clientWidth);
  const height = LINE * (lines.length + 1) + 4;
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, height, role: "img" })) svg.setAttribute(name, value);
  svg.setAttribute("aria-label", treeInWords(step, trace));
  const wide = width >= 370;
  const columns = { said: width, worth: width - 70, confidence: width - (step.worth.length ? 112 : 70) };
  columns.source = columns.confidence - 68 - 62;
  const graph = 10 + LANE * Math.max(...lines.map((line) => line.lane));
  renderHead(svg, columns, wide, step);
  const x = (line) => 8 + LANE * line.lane, y = (i) => LINE * (i + 1) + LINE / 2;
  lines.forEach((line, i) => { if (line.parent !== null) edge(svg, line, lines[line.parent], x, (l) => y(lines.indexOf(l))); });
  const room = ((wide ? columns.source : columns.confidence - 68) - graph - 24) / 7.4;
  lines.forEach((line, i) => renderLine(svg, line, { x: x(line), y: y(i), graph, columns, wide, room, step, trace, answer }));
  at("tree").replaceChildren(svg);
}

function renderHead(svg, columns, wide, step) {
  const y = 15;
  draw(svg, "text", { class: "small", x: 0, y }, "token");
  if (wide && step.tokens.length) draw(svg, "text", { class: "small", x: columns.source, y }, "by");
  if (step.confidence.length) draw(svg, "text", { class: "small end", x: columns.confidence, y }, "confidence");
  if (step.worth.length) draw(svg, "text", { class: "small end", x: columns.worth, y }, "worth");
  draw(svg, "line", { class: "rule", x1: 0, x2: columns.said, y1: LINE - 3, y2: LINE - 3 });
}

function edge(svg, line, parent, x, y) {
  const [px, py, cx, cy] = [x(parent), y(parent), x(line), y(line)];
  const style = line.kind === "accepted" || line.kind === "target" ? " kept" : line.kind === "dropped" ? " cut" : "";
  const d = px === cx ? `M${px} ${py}V${cy}` : `M${px} ${py}V${cy - 8}Q${px} ${cy} ${cx} ${cy}`;
  const made = draw(svg, "path", { class: `edge${style}`, d });
  if (!style) svg.insertBefore(made, svg.firstChild); // committed paths lie on top
}

function renderLine(svg, line, { x, y, graph, columns, wide, room, step, trace, answer }) {
  const { node, kind } = line;
  const group = draw(svg, "g", {});
  const own = node === null || node === -1;
  const id = node === null ? step.verdict[step.verdict.length - 1] : node === -1 ? pendingOf(step, answer) : step.tokens[node];
  const source = own ? "target" : step.sources[node];
  const hue = colour(trace, source);
  const committed = kind === "accepted" || kind === "target" || kind === "pending";
  const shape = { class: `node k${hue}${committed ? ` f${hue}` : " hollow"}${kind === "dropped" ? " cut" : ""}` };
  const r = radius(step, node);
  if (own) draw(group, "rect", { ...shape, x: x - r, y: y - r, width: 2 * r, height: 2 * r });
  else draw(group, "circle", { ...shape, cx: x, cy: y, r });
  const text = id === null ? "the prompt's last token" : spelled(trace, id);
  const look = `mono${committed ? " trunk" : " no"}${kind === "rejected" ? " struck" : ""}`;
  const written = id === null ? "…" : label(text, Math.max(4, Math.floor(room)));
  draw(group, "text", { class: look, x: graph + 12, y: y + 4 }, written);
  if (!own) {
    if (wide) draw(group, "text", { class: "small", x: columns.source, y: y + 4 }, label(source, step.confidence.length ? 9 : 18));
    if (step.confidence.length) renderBar(group, columns.confidence, y, step.confidence[node], hue);
    if (step.worth.length) draw(group, "text", { class: "end", x: columns.worth, y: y + 4 }, rounded(step.worth[node]));
  }
  const said = node === null ? closing(step) : kind;
  const tick = kind === "accepted" || kind === "target" ? " yes" : "";
  draw(group, "text", { class: `small end${tick}`, x: columns.said, y: y + 4 }, { accepted: "✓ accepted", rejected: "✗ rejected" }[said] || said);
  draw(group, "title", {}, `${label(text, 80)}${id === null ? "" : ` (token ${id})`}, ${source}: ${said}`);
}

function renderBar(group, right, y, share, hue) {
  const long = 22;
  draw(group, "rect", { class: "track", x: right - 40 - long, y: y - 3, width: long, height: 6, rx: 2 });
  draw(group, "rect", { class: `f${hue}`, x: right - 40 - long, y: y - 3, width: long * Math.min(1, Math.max(0, share)) || 0, height: 6, rx: 2 });
  draw(group, "text", { class: "end", x: right, y: y + 4 }, percent(share).replace(" ", ""));
}

/** The token that the step began after, where the trace has it. */
function pendingOf(step, answer) {
  if (step.from > 0) return answer.tokens[step.from - 1].id;
  const request = state.trace.requests.get(answer.request);
  const id = request && request.prompt[request.prompt.length - 1];
  if (id === undefined) return null;
  if (!state.trace.texts.has(id) && request.pieces) state.trace.texts.set(id, request.pieces[request.pieces.length - 1]);
  return id;
}

function treeInWords(step, trace) {
  const said = (nodes) => nodes.map((node) => label(spelled(trace, step.tokens[node]))).join(" ");
  const rejected = [...step.kept].filter((node) => !step.path.includes(node));
  const dropped = step.tokens.map((_, node) => node).filter((node) => !step.kept.has(node));
  return [
    `A tree of ${plural(step.tokens.length, "node")}`,
    step.path.length ? `accepted: ${said(step.path)}` : "none accepted",
    ...(rejected.length ? [`rejected: ${said(rejected)}`] : []),
    ...(dropped.length ? [`dropped: ${said(dropped)}`] : []),
  ].join("; ");
}

function renderTime(step) {
  const width = Math.max(220, at("time").clientWidth), height = 14;
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, height, role: "img" })) svg.setAttribute(name, value);
  const phases = Object.entries(step.line.s).sort(([a], [b]) => (PHASES[a] ?? 9) - (PHASES[b] ?? 9));
  const hue = (name) => PHASES[name] ?? 5;
  let left = 0;
  for (const [name, seconds] of phases) {
    const part = step.seconds ? (width * seconds) / step.seconds : 0;
    draw(svg, "rect", { class: `f${hue(name)}`, x: left, y: 0, width: Math.max(0, part - 1), height });
    left += part;
  }
  const told = phases.map(([name, seconds]) => `${name} ${milliseconds(seconds)}, ${percent(seconds / step.seconds)}`);
  svg.setAttribute("aria-label", told.join("; "));
  const legend = phases.map(([name], i) => element("li", {}, element("span", { class: `swatch b${hue(name)}` }), told[i]));
  at("time").replaceChildren(svg, element("ul", {}, ...legend));
}

function renderStep() {
  const { trace, answer } = state;
  const step = answer.steps[state.at];
  at("step").hidden = !step;
  if (!step) return;
  at("h-step").textContent = `Step ${(state.at + 1).toLocaleString("en")} of ${answer.steps.length.toLocaleString("en")}: ${plural(step.gained, "token")}${state.held ? " (held)" : ""}`;
  at("slider").value = state.at + 1;
  at("slider").setAttribute("aria-valuetext", `step ${state.at + 1} of ${answer.steps.length}`);
  at("why").textContent = reasons(step, trace);
  renderTree(step);
  renderTime(step);
  renderDecided(step, trace, answer);
  const faults = step.line.f || [];
  at("faults").hidden = !faults.length;
  at("faults").replaceChildren(...faults.map((fault) => element("li", {}, fault)));
  at("facts").textContent = stepFacts(step, answer);
}

function stepFacts(step, answer) {
  const rows = step.line.r.length, chunks = step.line.c || [];
  const said = [`engine step ${step.line.step}`, `row ${step.row}`, `after ${plural(step.start, "committed token")}`];
  said.push(`${milliseconds(step.seconds)} (median ${milliseconds(answer.median)})`);
  if (rows > 1) said.push(`shared by ${plural(rows, "row")}`);
  const prefilled = chunks.reduce((sum, chunk) => sum + chunk[4], 0);
  if (prefilled) said.push(`beside ${plural(prefilled, "token")} of prefill`);
  if (answer.margins) {
    const won = answer.margins.slice(step.from, step.from + step.gained).map(Number);
    if (won.length) said.push(`closest choice won by ${Math.min(...won).toPrecision(3)}`);
  }
  return said.join(" · ");
}

// -- moving ----------------------------------------------------------------------------------------------------------------

const state = { trace: null, answer: null, index: 0, at: 0, held: false, spans: [], marked: [], chart: null, alone: false };

function chooseAnswer(index) {
  const { answers } = state.trace;
  state.index = Math.max(0, Math.min(answers.length - 1, index));
  state.answer = answers[state.index];
  state.held = false;
  state.marked = [];
  if (!state.answer) return;
  const sorted = state.answer.steps.map((step) => step.seconds).sort((a, b) => a - b);
  state.answer.median = sorted[Math.floor(sorted.length / 2)] || 0;
  at("slider").max = Math.max(1, state.answer.steps.length);
  at("list").querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-current", String(i === state.index)));
  const current = at("list").children[state.index];
  if (current && !at("answers").hidden) current.scrollIntoView({ block: "nearest" });
  renderAnswer();
  renderFigures();
  renderCharts();
  chooseStep(telling(state.answer.steps));
}

/** The step that shows most: something was rejected, and the target agreed with much before. */
function telling(steps) {
  const worth = (step) => Math.min(step.path.length, step.gained) + (closing(step) === "recovered" ? 1e6 : 0);
  return steps.reduce((best, step, i) => (worth(step) > worth(steps[best]) ? i : best), 0);
}

/** ``follow``: bring the step's tokens into sight; not where the pointer is on them already. */
function chooseStep(index, follow = true) {
  const steps = state.answer.steps;
  state.at = Math.max(0, Math.min(steps.length - 1, index));
  for (const span of state.marked) span.classList.remove("now", "first", "last");
  const step = steps[state.at];
  const own = step ? state.spans.slice(step.from, step.from + step.gained) : [];
  const written = own.filter((span) => span.textContent); // half a character has no text of its own
  state.marked = written.length ? written : own;
  state.marked.forEach((span, i) => {
    span.classList.add("now");
    span.classList.toggle("first", i === 0);
    span.classList.toggle("last", i === state.marked.length - 1);
  });
  if (follow && state.marked.length) bringIntoSight(state.marked[0]);
  renderStep();
  moveMarks();
  if (step && parent !== window && !state.alone) parent.postMessage({ token: step.from }, "*");
}

/** Beside another trace: the step that wrote the token that the other one shows. */
function follow(event) {
  if (event.source !== parent || !state.answer) return;
  if (event.data === "lead") chooseStep(state.at); // the first of several: the others show the same token
  if (!Number.isInteger(event.data.token)) return;
  const token = state.answer.tokens[Math.min(event.data.token, state.answer.tokens.length - 1)];
  state.alone = true; // the others show it already
  if (token) chooseStep(token.step);
  state.alone = false;
}

/** Scrolls the text alone: the page around it stays where it is. Blocks that come into sight only then get their real
    height, so it looks again a few frames later. */
function bringIntoSight(span, again = 3) {
  const pane = at("text").getBoundingClientRect(), box = span.getBoundingClientRect();
  if (box.top < pane.top + 24 || box.bottom > pane.bottom - 24) at("text").scrollTop += box.top - pane.top - pane.height / 3;
  if (again) requestAnimationFrame(() => { if (span === state.marked[0]) bringIntoSight(span, again - 1); });
}

const KEYS = {
  ArrowLeft: (event) => chooseStep(state.at - (event.shiftKey ? 10 : 1)),
  ArrowRight: (event) => chooseStep(state.at + (event.shiftKey ? 10 : 1)),
  Home: () => chooseStep(0),
  End: () => chooseStep(state.answer.steps.length - 1),
  ArrowUp: () => chooseAnswer(state.index - 1),
  ArrowDown: () => chooseAnswer(state.index + 1),
  Escape: () => { state.held = false; renderStep(); },
  t: toggleTheme,
  "?": () => at("keys").showModal(),
};

function onKey(event) {
  if (at("keys").open || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = KEYS[event.key];
  if (!act || !state.answer) return;
  event.preventDefault();
  act(event);
}

function tokenAt(event) {
  const span = event.target.closest("#pieces span[data-i]");
  return span ? state.answer.tokens[Number(span.dataset.i)] : null;
}

function onPointer(event) {
  const token = state.held || event.pointerType === "touch" ? null : tokenAt(event);
  if (token && token.step !== state.at) chooseStep(token.step, false);
}

function onClick(event) {
  const token = tokenAt(event);
  if (!token || String(getSelection())) return;
  state.held = !(state.held && token.step === state.at);
  chooseStep(token.step, false);
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

/** What is as wide as its container is drawn again when that changes. */
function onResize() {
  if (!state.answer) return;
  renderCharts();
  renderStep();
  moveMarks();
}

function describeRun(header, name) {
  const { model, engine, machine } = header;
  const parts = [name];
  if (model) parts.push(model.name, [model.backend, model.path].filter(Boolean).join(" "), model.dtype);
  if (engine) parts.push((engine.drafters || []).join(", "), engine.acceptance);
  if (machine) parts.push(machine.model);
  return [...parts.filter(Boolean), `outpace ${header.outpace}`, header.time].filter(Boolean).join(" · ");
}

function start() {
  state.trace = readTrace(JSON.parse(at("trace").textContent));
  at("run").textContent = at("run").title = describeRun(state.trace.header, state.trace.name);
  at("cut").hidden = !state.trace.cut;
  at("cut").textContent = state.trace.cut ? `This trace is not whole: ${state.trace.cut}.` : "";
  renderLegend();
  renderList();
  document.addEventListener("keydown", onKey);
  at("pieces").addEventListener("pointerover", onPointer);
  at("pieces").addEventListener("click", onClick);
  at("slider").addEventListener("input", (event) => chooseStep(event.target.valueAsNumber - 1));
  at("back").onclick = () => chooseStep(state.at - 1);
  at("forth").onclick = () => chooseStep(state.at + 1);
  at("theme").onclick = toggleTheme;
  at("help").onclick = KEYS["?"];
  if (!state.trace.answers.length) {
    at("app").replaceChildren(element("p", {}, "This trace has no steps yet."));
    return;
  }
  state.alone = true;
  chooseAnswer(0);
  state.alone = false;
  if (parent !== window) addEventListener("message", follow);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(onResize, 60); });
}

if (at("trace").textContent) start(); // else a script that follows brings the trace
