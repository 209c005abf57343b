// What decided a step's tokens, where the trace has probabilities (docs/traces.md): p, q, random numbers, another k.
"use strict";

const DEPTHS = 8; // places that are drawn at most

/** Places by node: what the target chose after it, its likeliest tokens, and under rejection the trials. */
function readPlaces(row) {
  const likely = (of) => of.map(([token, p, noise]) => ({ token, p: Number(p), noise: Number(noise) }));
  return new Map((row.i || []).map(([node, choice, likeliest, trials, residual, q]) => [node, {
    choice, q: q.map(Number), likeliest: likely(likeliest), residual: likely(residual),
    trials: trials.map(([child, chance, uniform, accepted]) => ({ child, chance: Number(chance), uniform: Number(uniform), accepted })),
  }]));
}

/** A node's radius, which grows with the target's probability of its token. */
function radius(step, node) {
  const last = step.path.length ? step.path[step.path.length - 1] : -1;
  const place = node === null ? step.places.get(last) : null;
  const p = place ? (place.likeliest.find((one) => one.token === place.choice) || {}).p : step.p[node];
  return Number.isFinite(p) ? 2 + 5 * Math.sqrt(p) : 4.5;
}

const shortly = (p) => (p >= 0.995 && p < 1 ? "0.99+" : p > 0 && p < 0.005 ? "<0.01" : rounded(p));

/** The tokens that the step would have gained, had only its first `k` verified nodes been drafted: choices are known
    after every node, so they are followed as verification does. */
function gainedWith(step, k) {
  const nodes = [...step.kept].sort((a, b) => a - b).slice(0, k);
  if (step.places.get(-1).trials.length) { // rejection: the trials stand, the token after them would be drawn anew
    const path = step.path.filter((node) => nodes.includes(node));
    const whole = path.length === step.path.length;
    const same = whole && sameTrials(step, nodes, path);
    return { tokens: [...path.map((node) => step.tokens[node]), ...(same ? step.verdict.slice(-1) : [])], drawn: !same };
  }
  const tokens = [];
  let at_ = -1;
  for (;;) {
    const { choice } = step.places.get(at_);
    tokens.push(choice);
    const child = nodes.find((node) => step.parents[node] === at_ && step.tokens[node] === choice);
    if (child === undefined) return { tokens, drawn: false };
    at_ = child;
  }
}

const sameTrials = (step, nodes, path) => {
  const last = path.length ? path[path.length - 1] : -1;
  return [...step.kept].every((node) => step.parents[node] !== last || nodes.includes(node));
};

/** Why the target wrote what it wrote after a place. */
function because(step, place, node, trace, answer) {
  const say = (token) => quoted(spelled(trace, token));
  const children = [...step.kept].filter((child) => step.parents[child] === node);
  const greedy = greedyOf(trace, answer);
  if (place.trials.length) {
    const told = place.trials.map(({ child, chance, uniform, accepted }) =>
      `${say(step.tokens[child])}: u = ${rounded(uniform, 3)} is ${accepted ? "below" : "not below"} min(1, p/q) = ${rounded(chance, 3)}, so it was ${accepted ? "accepted" : "refused"}.`);
    if (place.residual.length) told.push(`${say(place.choice)} was drawn from what was left, max(p − q, 0) made to sum to 1.`);
    return told.join(" ");
  }
  if (place.choice < 0) return "Nobody asked the target here: the path had ended before.";
  const rule = greedy ? `the likeliest token is ${say(place.choice)}` : `log p plus noise is largest for ${say(place.choice)}`;
  if (!children.length) return `Nothing was drafted here; ${rule}.`;
  const agreed = children.find((child) => step.tokens[child] === place.choice);
  return agreed === undefined
    ? `${rule[0].toUpperCase()}${rule.slice(1)}, which was not drafted: ${children.map((child) => say(step.tokens[child])).join(", ")} refused.`
    : `${say(place.choice)} accepted: ${rule}.`;
}

function greedyOf(trace, answer) {
  const request = trace.requests.get(answer.request);
  return !request || !request.params.temperature;
}

function renderDecided(step, trace, answer) {
  if (!step.places.size) return at("decided").replaceChildren();
  const shown = [-1, ...step.path].slice(0, DEPTHS);
  const blocks = shown.filter((node) => step.places.has(node)).map((node) => placeBlock(step, node, trace, answer));
  at("decided").replaceChildren(
    element("h3", {}, "Why each token"), ...blocks,
    ...(step.path.length >= DEPTHS ? [element("p", { class: "quiet" }, `The first ${DEPTHS} are shown.`)] : []),
    element("h3", {}, "With another k"), otherSizes(step, trace));
}

function placeBlock(step, node, trace, answer) {
  const place = step.places.get(node);
  const drafted = new Map([...step.kept].filter((child) => step.parents[child] === node).map((child) => [step.tokens[child], child]));
  const noisy = place.likeliest.some((one) => one.noise !== 0);
  const left = new Map(place.residual.map((one) => [one.token, one.p]));
  const known = [...drafted.values()].some((child) => Number.isFinite(step.q[child]));
  const head = ["token", "p", ...(known ? ["q"] : []), ...(noisy ? ["noise", "sum"] : []), ...(left.size ? ["residual"] : [])];
  const tokens = [...place.likeliest, ...place.residual.filter((one) => !place.likeliest.some((other) => other.token === one.token)).map((one) => ({ ...one, p: NaN }))];
  const rows = tokens.map(({ token, p, noise }, i) => {
    const child = drafted.get(token), chosen = token === place.choice;
    const name = element("th", { scope: "row", class: "mono" }, label(spelled(trace, token), 14));
    const meter = element("span", { class: "meter" }, svgBar(p));
    const cells = [element("td", { class: "p" }, meter, element("span", {}, shortly(p)))];
    if (known) cells.push(element("td", {}, i in place.q ? shortly(place.q[i]) : child === undefined ? "" : shortly(step.q[child])));
    if (noisy) cells.push(element("td", {}, rounded(noise)), element("td", {}, p > 0 ? rounded(Math.log(p) + noise) : "–"));
    if (left.size) cells.push(element("td", {}, left.has(token) ? shortly(left.get(token)) : ""));
    const mark = element("td", { class: "quiet" }, [child === undefined ? "" : "drafted", chosen ? "written" : ""].filter(Boolean).join(", "));
    return element("tr", chosen ? { class: "chosen" } : {}, name, ...cells, mark);
  });
  const title = node === -1 ? "After the pending token" : `After ${quoted(spelled(trace, step.tokens[node]))}`;
  const heads = [...head, ""].map((name) => element("th", { scope: "col" }, name));
  return element("div", { class: "place" },
    element("p", {}, element("b", {}, `${title}. `), because(step, place, node, trace, answer)),
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
}

function svgBar(p) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 40 6");
  svg.setAttribute("aria-hidden", "true");
  draw(svg, "rect", { class: "track", width: 40, height: 6, rx: 2 });
  draw(svg, "rect", { class: "f0", width: 40 * (Number.isFinite(p) ? p : 0), height: 6, rx: 2 });
  return svg;
}

function otherSizes(step, trace) {
  const rows = [];
  for (let k = 0; k <= step.kept.size; k++) {
    const { tokens, drawn } = gainedWith(step, k);
    const text = tokens.map((token) => label(spelled(trace, token), 12)).join(" ");
    const cells = [element("td", {}, plural(tokens.length + (drawn ? 1 : 0), "token")), element("td", { class: "mono" }, text + (drawn ? " + one drawn" : ""))];
    rows.push(element("tr", k === step.kept.size ? { class: "chosen" } : {}, element("th", { scope: "row" }, `k = ${k}`), ...cells));
  }
  return element("table", { class: "sizes" }, element("tbody", {}, ...rows));
}
