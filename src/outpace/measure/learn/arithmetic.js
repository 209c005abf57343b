// The formulas of the page, pure: what tests compare with outpace.exact.
"use strict";

/** Tokens a step brings on average: k drafted ones, each accepted with probability a given the one before. */
const expectedTokens = (a, k) => (a === 1 ? k + 1 : (1 - a ** (k + 1)) / (1 - a));

/** Milliseconds of a forward of `n` tokens, from a measured table; beyond it on its last slope, as `Cost.width`. */
function costOf(cost, n) {
  const { widths, seconds } = cost;
  const after = widths.findIndex((w) => w >= n);
  if (after < 0) {
    const last = widths.length - 1, before = Math.max(last - 1, 0);
    const slope = last ? (seconds[last] - seconds[before]) / (widths[last] - widths[before]) : seconds[0] / widths[0];
    return 1e3 * (seconds[last] + slope * (n - widths[last]));
  }
  if (after === 0 || widths[after] === n) return 1e3 * seconds[after];
  const share = (n - widths[after - 1]) / (widths[after] - widths[after - 1]);
  return 1e3 * (seconds[after - 1] + share * (seconds[after] - seconds[after - 1]));
}

/** Speed over plain decoding: `draft` is what a drafted token costs, in plain steps. */
const speedOf = (a, k, draft, cost) => expectedTokens(a, k) / (costOf(cost, k + 1) / costOf(cost, 1) + k * draft);

const normalized = (weights) => {
  const total = weights.reduce((sum, w) => sum + w, 0);
  return total > 0 ? weights.map((w) => w / total) : null;
};

/** What is left of p after q was refused; p itself where nothing is. */
const residualOf = (p, q) => normalized(p.map((x, i) => Math.max(x - q[i], 0))) || p;

/** The chance that a token drawn from q is accepted: the overlap of p and q. */
const acceptanceOf = (p, q) => p.reduce((sum, x, i) => sum + Math.min(x, q[i]), 0);

function drawFrom(p, random) {
  let u = random();
  for (let i = 0; i < p.length; i++) if ((u -= p[i]) < 0) return i;
  return p.findLastIndex((x) => x > 0);
}

/** One token by the rule: `{ drafted, accepted, token }`. */
function speculate(p, q, random) {
  const drafted = drawFrom(q, random);
  const accepted = random() < Math.min(1, p[drafted] / q[drafted]);
  return { drafted, accepted, token: accepted ? drafted : drawFrom(residualOf(p, q), random) };
}

/** Every way the rule can go, with its probability. */
function everyWay(p, q) {
  const left = residualOf(p, q), ways = [];
  q.forEach((share, x) => {
    if (!(share > 0)) return;
    const accept = Math.min(1, p[x] / share);
    ways.push({ drafted: x, accepted: true, token: x, probability: share * accept });
    left.forEach((r, y) => {
      if (accept < 1 && r > 0) ways.push({ drafted: x, accepted: false, token: y, probability: share * (1 - accept) * r });
    });
  });
  return ways.filter((way) => way.probability > 0);
}

const summed = (ways, n) => Array.from({ length: n }, (_, i) => ways.filter((way) => way.token === i).reduce((sum, way) => sum + way.probability, 0));

/** Numbers in [0, 1) that are the same on every visit (mulberry32). */
function randomFrom(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** What a greedy draft of `tokens` gains where the target's choices are `choices` (one more than tokens). */
function prefixOf(tokens, choices) {
  let accepted = 0;
  while (accepted < tokens.length && tokens[accepted] === choices[accepted]) accepted += 1;
  return { accepted, gained: choices.slice(0, accepted + 1), bonus: accepted === tokens.length };
}
