// Chapters 1 to 5: what a step is, and why its output is the target's.
const runs = JSON.parse(document.getElementById("runs").textContent);
const word = (token) => runs.texts[token] ?? `[${token}]`;
const plain = runs.who.none;
const drafted = (step) => step.t || [];
const parents = (step) => step.p || drafted(step).map((_, i) => i - 1);
const path = (step) => step.h || [];
const gained = (step) => step.v.slice(0, step.g ?? step.v.length);
const took = (step) => 1e3 * Object.values(step.s).reduce((a, b) => a + b, 0);
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] || 0;
const textUpTo = (run, tokens) => run.pieces.slice(0, tokens).join("");
const rate = (run) => (1e3 * run.tokens.length) / run.steps.map(took).reduce((a, b) => a + b, 0); // tokens a second
const drafterOf = (name) => (name === "model:demo-draft" ? `${name}, a model of 16 million parameters distilled from the target` : name);
const perToken = median(plain.steps.map(took));
const places = (step) => new Map((step.i || []).map(([node, choice, likeliest, trials, residual, q]) => [node, { choice, likeliest, trials, residual, q }]));

const CHAPTERS = [];
const chapter = (id, title, words, build, question, answer, code) => CHAPTERS.push({ id, title, words, build, question, answer, code });

chapter("token", "One token at a time", [
  "A language model reads the prompt, many tokens a pass (prefill). Then it writes token by token: each one is chosen from the model's scores, appended, and goes through the model again.",
  "For every token all weights are read from memory. The arithmetic for one token is small beside that, so with a large model the processor mostly waits for memory.",
], (panel) => {
  const out = make("p", { class: "text" }), facts = make("p", { class: "quiet" });
  const control = slider("tokens written", { min: 0, max: plain.tokens.length, value: 12 }, (n) => {
    out.textContent = textUpTo(plain, n);
    const last = n ? took(plain.steps[n - 1]) : 1e3 * plain.prefill;
    facts.textContent = n
      ? `Token ${n} took ${ms(last)}; the median is ${ms(perToken)}. ${(runs.weights / 1e6).toFixed(0)} MB of weights in that time are ${(runs.weights / 1e6 / perToken).toFixed(1)} GB/s.`
      : `Prefill: ${plain.read} prompt tokens in ${ms(last)}, ${ms(last / plain.read)} each: many tokens share one reading of the weights.`;
  });
  panel.append(make("p", { class: "quiet" }, `Prompt: ${plain.prompt}`), control.label, out, facts);
  control.move();
}, "Why is a prompt's token cheaper than a written one?", "All of the prompt is known, so its tokens go through the model together, and the weights are read once for many of them. A token that is still to be written is not known, so it waits for the one before.", "choose");

chapter("width", "Checking is cheaper than writing", [
  "Give a forward pass several tokens of one row, and it returns the scores after each of them. The weights are read once. This is the measured cost here.",
  "So if someone guesses the next tokens, the model can check all guesses in one pass for little more than the price of one token.",
], (panel) => {
  const chart = make("div"), facts = make("p");
  const most = Math.min(32, runs.cost.widths[runs.cost.widths.length - 1]);
  const points = Array.from({ length: most }, (_, i) => [i + 1, costOf(runs.cost, i + 1)]);
  const control = slider("tokens in one pass", { min: 1, max: most, value: 5 }, (n) => {
    const together = costOf(runs.cost, n), apart = n * costOf(runs.cost, 1);
    chart.replaceChildren(curveOf(points, n, { across: "tokens in one pass", up: "ms a pass", words: `A pass of ${n} tokens takes ${ms(together)}` }));
    facts.textContent = `${countOf(n, "token")} in one pass: ${ms(together)}. One after the other: ${n} × ${ms(costOf(runs.cost, 1))} = ${ms(apart)}, ${fixed(apart / together)} times as long.`;
  });
  panel.append(control.label, chart, facts);
  control.move();
}, "When does the curve stop being flat?", "When arithmetic, not memory, is what a pass waits for. On this processor that begins at a few tokens; on a GPU at dozens or hundreds. Other rows in the batch use up the same spare arithmetic.", "width");

chapter("greedy", "Draft, verify, accept", [
  "Something cheap drafts k tokens. The target checks them in one pass: after the pending token and after every drafted one it says what it would write itself. Greedy decoding: its likeliest token.",
  "The longest prefix of the draft that agrees is kept. Then the target's own token follows: recovered after a disagreement, a bonus when all agreed. So a step gains between 1 and k + 1 tokens, and each is the one that the target chose.",
], (panel) => {
  const run = runs.greedy, steps = run.steps.filter((step) => drafted(step).length && step.i && !step.p); // chains
  if (!steps.length) return nothing(panel);
  const draftRow = make("div", { class: "tokens" }), gainRow = make("div", { class: "tokens" }), choiceRow = make("div", { class: "tokens" }), facts = make("p");
  let refused = -1;
  const draw = () => {
    const step = steps[at.value - 1], after = places(step);
    const chain = drafted(step).slice(0, k.value);
    const choices = [-1, ...chain.keys()].map((node) => after.get(node).choice);
    const shown = chain.map((token, i) => (i === refused ? -1 : token));
    const { accepted, gained: won, bonus } = prefixOf(shown, choices);
    draftRow.replaceChildren(...chain.map((token, i) => {
      const button = chip(word(token), i < accepted ? "yes" : "no", "button");
      button.setAttribute("aria-label", `${word(token)}: ${i < accepted ? "accepted; press to draft another token instead" : "refused"}`);
      button.onclick = () => { refused = refused === i ? -1 : i; draw(); };
      return button;
    }));
    choiceRow.replaceChildren(...choices.map((token, i) => chip(word(token), i <= accepted ? "" : "no")));
    gainRow.replaceChildren(...won.map((token, i) => chip(word(token), i < accepted ? "yes" : "own")));
    const hand = refused < 0 || refused >= chain.length ? "" : ` You replaced “${visible(word(chain[refused]))}”: ${
      refused < prefixOf(chain, choices).accepted ? "the target writes its own choice there, the same text, only less of it in this step" : "it was refused or thrown away in any case, so nothing changes"}.`;
    facts.textContent = `Accepted ${accepted} of ${chain.length}; then ${bonus ? "a bonus token" : "the recovered token"}: ${countOf(won.length, "token")} from one pass of ${chain.length + 1}.${hand}`;
  };
  const at = slider("step of the run", { min: 1, max: steps.length, value: 1 + Math.max(0, steps.findIndex((step) => path(step).length && path(step).length < drafted(step).length)) }, () => { refused = -1; draw(); });
  const k = slider("k, drafted tokens", { min: 0, max: Math.max(...steps.map((step) => drafted(step).length)), value: 4 }, draw);
  panel.append(at.label, k.label, make("p", { class: "quiet" }, `Draft (${drafterOf(runs.last)}); press a token to refuse it by hand:`), draftRow,
    make("p", { class: "quiet" }, "What the target says after the pending token, and after each drafted one:"), choiceRow,
    make("p", { class: "quiet" }, "Gained:"), gainRow, facts);
  draw();
}, "Why does a refused token cost nothing but time?", "The target never uses it: the token in its place is the target's own choice after the same prefix. What follows a refused token was checked after a wrong prefix, so it is thrown away, too.", "walk");

chapter("sampling", "Sampling: min(1, p/q) and the residual", [
  "With a temperature the target does not have one answer but a distribution p. The drafter draws x from its own distribution q. Draw u between 0 and 1; keep x if u < min(1, p(x)/q(x)).",
  "After a refusal, draw from what is left of p: max(p − q, 0), made to sum to 1. Where q(x) is above p(x), x is sometimes refused; where it is below, the residual adds what is missing. The sum is p.",
], (panel) => {
  const of = (run) => run.steps.flatMap((step) => [...places(step)].filter(([, place]) => place.q.length).map(([node, place]) => ({ step, node, place })));
  const wanted = ({ place }) => place.likeliest[0][1] < 0.8 && place.q.reduce((sum, q, i) => sum + Math.min(q, place.likeliest[i][1]), 0) > 0.3 && place.trials.some((trial) => !trial[3]);
  const seen = ([, ...values]) => values.some((value) => value >= 5e-4); // others would be rows of 0.000
  const temperatures = Object.keys(runs.rejection);
  let found = [];
  if (!temperatures.every((t) => of(runs.rejection[t]).length)) return nothing(panel);
  const chart = make("div"), facts = make("p"), tally = make("div"), recorded = make("p", { class: "quiet" });
  let counts = null, drawn = 0, kept = 0, p, q, names;
  const random = randomFrom(7);
  const draw = () => {
    const { step, node, place } = found[at.value - 1];
    names = [...place.likeliest.map(([token]) => visible(word(token))), "all others"];
    p = [...place.likeliest.map(([, share]) => share)]; p.push(Math.max(0, 1 - p.reduce((a, b) => a + b, 0)));
    q = [...place.q]; q.push(Math.max(0, 1 - q.reduce((a, b) => a + b, 0)));
    const left = residualOf(p, q);
    chart.replaceChildren(barsOf(names.map((name, i) => [name, p[i], q[i], left[i]]).filter(seen), [["p, target", "p"], ["q, drafter", "q"], ["residual", "r"]], "p, q and the residual of each token"));
    const token = drafted(step)[parents(step).indexOf(node)];
    const pick = place.likeliest.findIndex(([each]) => each === token);
    const child = pick < 0 ? 0 : pick, chance = q[child] > 0 ? Math.min(1, p[child] / q[child]) : 1;
    facts.textContent = `Drafted “${names[child]}”: min(1, ${fixed(p[child], 3)} / ${fixed(q[child], 3)}) = ${fixed(chance, 3)}; u = ${fixed(u.value)} is ${u.value < chance ? "below: accepted." : "not below: refused, and a token is drawn from the residual."} Over all drafts, ${percentOf(acceptanceOf(p, q))} are accepted: the overlap of p and q (all other tokens are counted as one here).`;
    recorded.textContent = place.trials.length ? `In the recorded run u was ${fixed(place.trials[0][2], 3)}: ${place.trials[0][3] ? "accepted" : "refused"}.` : "The recorded run did not come this far: a token before was refused.";
    counts = null; drawn = kept = 0; tally.replaceChildren();
  };
  const many = () => {
    counts = counts || p.map(() => 0);
    for (let i = 0; i < 1000; i++) { const one = speculate(p, q, random); counts[one.token] += 1; kept += one.accepted; drawn += 1; }
    tally.replaceChildren(barsOf(names.map((name, i) => [name, p[i], counts[i] / drawn]).filter(seen), [["p", "p"], ["drawn by the rule", "r"]], "p beside what the rule drew"),
      make("p", { class: "quiet" }, `${drawn.toLocaleString("en")} draws, ${percentOf(kept / drawn)} accepted. The rule's shares go to p as draws are added.`));
  };
  const warm = slider("temperature", { min: 0, max: temperatures.length - 1, value: temperatures.indexOf("0.8"), show: (i) => temperatures[i] }, (i) => {
    found = of(runs.rejection[temperatures[i]]);
    at.input.max = found.length;
    at.input.value = 1 + Math.max(0, found.findIndex(wanted));
    at.move();
  });
  const at = slider("token of the run", { min: 1, max: 1, value: 1 }, draw);
  const u = slider("u", { min: 0, max: 0.999, step: 0.001, value: 0.5, show: (x) => fixed(x) }, draw);
  const button = make("button", { type: "button" }, "Draw 1,000 times");
  button.onclick = many;
  const same = JSON.stringify(runs.coupled.tokens) === JSON.stringify(runs.sampled.tokens);
  panel.append(make("p", { class: "quiet" }, `Prompt: ${runs.sampled.prompt} Drafts by ${drafterOf(runs.last)}.`), warm.label, at.label, u.label, chart, facts, recorded, button, tally,
    make("p", {}, `Outpace's default, coupled, goes further: the noise for a token depends only on the seed and its position, so target and drafter read the same noise. Seed 3, temperature 0.8, plain: “${textUpTo(runs.sampled, 12)}…” Drafted: “${textUpTo(runs.coupled, 12)}…” All ${runs.sampled.tokens.length} tokens are ${same ? "the same" : "NOT the same"}.`));
  warm.move();
}, "Why not just accept x with probability p(x)?", "Then too many drafts would be refused, and the output would not be p either: x arrives with probability q(x) already. Accepting with min(1, p/q) makes q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)), the most that can be accepted without giving x too often.", "reject");

chapter("exact", "Why it is exact", [
  "Take three tokens, and any p and q. The rule can only go a few ways: each drafted token, accepted, or refused with each token of the residual. Here is every way with its probability.",
  "Add up the ways that end in the same token: the sum is p, whatever q is. min(p, q) comes from acceptance, the missing max(p − q, 0) from the residual, because the chance of a refusal is exactly the residual's mass.",
], (panel) => {
  const ways = make("div"), sums = make("div"), names = ["A", "B", "C"];
  const controls = [];
  const draw = () => {
    const value = controls.map((control) => control.value);
    const p = normalized(value.slice(0, 3)) || [1, 0, 0], q = normalized(value.slice(3)) || [1, 0, 0];
    const all = everyWay(p, q), total = summed(all, 3);
    ways.replaceChildren(grid(["drafted", "", "written", "probability"], all.map((way) => [names[way.drafted], way.accepted ? "accepted" : "refused", names[way.token], fixed(way.probability, 6)])));
    sums.replaceChildren(grid(["token", "sum of its ways", "p", "difference"], names.map((name, i) => [name, fixed(total[i], 12), fixed(p[i], 12), Math.abs(total[i] - p[i]).toExponential(0)])),
      make("p", { class: "quiet" }, `Accepted: ${percentOf(acceptanceOf(p, q))}. Differences of 1e-16 are the last digit of the browser's numbers. Outpace's tests do the same for chains and trees of up to four nodes, in 64 bits, to 1e-12.`));
  };
  for (const [kind, start] of [["p", [5, 3, 2]], ["q", [2, 2, 6]]])
    start.forEach((value, i) => controls.push(slider(`${kind}(${names[i]}), weight`, { min: 0, max: 10, value }, draw)));
  panel.append(...controls.map((control) => control.label), ways, sums);
  draw();
}, "What if q is terrible?", "Then almost everything is refused and decoding is slow, but the output is still p. q decides the speed, p the text.", "residual");
