// Chapters 6 to 10, the race, and the page.
chapter("cache", "The KV cache, and rolling back", [
  "Each layer keeps a key and a value for every position it has seen: the KV cache. A step writes those of the pending token and of the whole draft behind what is committed.",
  "What was refused is not erased. The row's length is set back; the next step writes over it. Rolling back is arithmetic. A recurrent layer has one state instead, so there the accepted tokens are replayed or a copy of the state is kept.",
], (panel) => {
  const run = runs.greedy, steps = run.steps.filter((step) => drafted(step).length);
  if (!steps.length) return nothing(panel);
  const chart = make("div"), facts = make("p");
  const draw = () => {
    const step = steps[at.value - 1], k = drafted(step).length, a = Math.min(accepted.value, k);
    const from = step.a - 1, shown = NARROW ? 2 : 6, svg = picture(WIDE, 70, `Positions of the cache: ${from} committed, then ${k + 1} written, of which ${a + 1} stay`);
    const cells = [...Array.from({ length: shown }, (_, i) => [from - shown + i, "cell", "kept"]), [from, "one", "pending"],
      ...drafted(step).map((token, i) => [from + 1 + i, i < a ? "r" : "q", i < a ? "accepted" : "refused"])];
    const wide = Math.min(NARROW ? 46 : 62, (WIDE - 10) / cells.length);
    cells.forEach(([position, kind, what], i) => {
      shape(svg, "rect", { class: kind, x: i * wide, y: 20, width: wide - 4, height: 26, rx: 3 });
      shape(svg, "text", { class: "dim", x: i * wide + (wide - 4) / 2, y: 62, "text-anchor": "middle" }, position);
      shape(svg, "text", { class: "dim", x: i * wide + (wide - 4) / 2, y: 12, "text-anchor": "middle" }, what === "kept" ? "" : NARROW ? { pending: "▾", accepted: "✓", refused: "✗" }[what] : what);
    });
    chart.replaceChildren(svg);
    facts.textContent = `Before: length ${from}. The pass writes ${k + 1} positions: length ${from + k + 1}. With ${a} accepted the length becomes ${from} + 1 + ${a} = ${from + 1 + a}; ${countOf(k - a, "position")} will be written over. The target's own token is the new pending one: its keys and values come with the next pass. In the recorded run ${path(step).length} of ${k} were accepted.`;
  };
  const at = slider("step of the run", { min: 1, max: steps.length, value: Math.min(3, steps.length) }, () => { accepted.input.value = path(steps[at.value - 1]).length; accepted.output.textContent = accepted.input.value; draw(); });
  const accepted = slider("accepted tokens", { min: 0, max: Math.max(...steps.map((step) => drafted(step).length)), value: 1 }, draw);
  panel.append(at.label, accepted.label, chart, facts);
  draw();
}, "Why is the pending token's KV missing?", "It was chosen from the last pass's scores and has not been through the model yet. It goes first into the next pass, with the draft behind it.", "settle");

chapter("k", "How many tokens to draft", [
  "If each drafted token is accepted with probability a, given the ones before, a step with k of them brings 1 + a + … + a^k = (1 − a^(k+1)) / (1 − a) tokens. It costs one pass of k + 1 tokens and k drafted tokens.",
  "The speed over plain decoding is the one divided by the other. The textbook's example: k = 4, a = 70 % gives 2.77 tokens a step. That is 2.77 times the speed only if drafting and the wider pass were free.",
], (panel) => {
  const chart = make("div"), facts = make("p");
  const draw = () => {
    const points = Array.from({ length: 13 }, (_, n) => [n, speedOf(a.value, n, d.value, runs.cost)]);
    const best = points.reduce((top, point) => (point[1] > top[1] ? point : top));
    chart.replaceChildren(curveOf(points, k.value, { across: "k, drafted tokens", up: "speed over plain decoding", words: `Speed by k: best is ${best[0]}` }));
    const tokens = expectedTokens(a.value, k.value), pass = costOf(runs.cost, k.value + 1) / costOf(runs.cost, 1);
    facts.textContent = `k = ${k.value}: ${fixed(tokens)} tokens a step; it costs ${fixed(pass)} (the pass) + ${fixed(k.value * d.value)} (the draft) plain steps: ${fixed(tokens / (pass + k.value * d.value))} times plain decoding. The best is k = ${best[0]}, ${fixed(best[1])} times.`;
  };
  const a = slider("a, acceptance", { min: 0, max: 0.99, step: 0.01, value: 0.7, show: percentOf }, draw);
  const k = slider("k", { min: 0, max: 12, value: 4 }, draw);
  const d = slider("a drafted token's cost", { min: 0, max: 0.6, step: 0.01, value: 0.05, show: (x) => `${fixed(x)} steps` }, draw);
  panel.append(a.label, k.label, d.label, chart, facts, make("p", { class: "quiet" }, "The cost by width is the measured one of chapter 2. A real acceptance is not one number: it differs by text and falls with depth, so Outpace decides in every step."));
  draw();
}, "Why is more not better?", "Each further token is accepted less often (a^k) but costs as much, and a wide pass is dearer. Beyond the best k, a step takes longer than what it gains.", "plan");

chapter("who", "Who drafts", [
  "Anything may draft: a smaller model, the target's own first layers, a small network on the target's hidden states (EAGLE), or a lookup of text that was there before (ngram, suffix). Lookups cost almost nothing and hit when text repeats.",
  "Here the same prompt was decoded with each of them. All wrote the same tokens; what differs is how many passes that took, and what drafting cost.",
], (panel) => {
  const names = Object.keys(runs.who), rest = make("div"), table = make("div"), facts = make("p");
  const sum = (run, count) => run.steps.reduce((total, step) => total + count(step), 0);
  const draw = () => {
    const chosen = who.value, run = runs.who[chosen];
    let from = 0;
    const step = run.steps.find((each) => { if (from + gained(each).length > at.value) return true; from += gained(each).length; return false; }) || run.steps[0];
    const rows = names.map((name) => {
      const one = runs.who[name], proposed = sum(one, (each) => drafted(each).length), hit = sum(one, (each) => path(each).length);
      return [name === "none" ? "none (plain)" : name, fixed(one.tokens.length / one.steps.length), proposed ? percentOf(hit / proposed) : "–", fixed(median(one.steps.map((each) => 1e3 * (each.s.draft || 0)))), fixed(rate(one), 0), JSON.stringify(one.tokens) === JSON.stringify(plain.tokens) ? "same" : "differs"];
    });
    table.replaceChildren(grid(["drafter", "tokens a step", "accepted", "draft, ms", "tokens/s", "answer"], rows, names.indexOf(chosen)));
    const chips = drafted(step).map((token, i) => chip(word(token), path(step).includes(i) ? "yes" : "no"));
    rest.replaceChildren(...(chips.length ? chips : [make("span", { class: "quiet" }, "nothing was drafted")]), chip(word(step.v[step.v.length - 1]), "own"));
    facts.textContent = `The step that wrote token ${at.value + 1}: after “…${textUpTo(run, from).slice(-24)}” it drafted ${drafted(step).length}, ${path(step).length} were accepted, and the target added its own.`;
  };
  const who = chooser("drafter", names.map((name) => [name, name === "none" ? "none (plain)" : name]), draw);
  who.select.value = names[names.length - 1];
  const at = slider("token of the answer", { min: 0, max: plain.tokens.length - 1, value: Math.floor(plain.tokens.length * 0.7), show: (n) => String(n + 1) }, draw);
  panel.append(who.label, at.label, rest, facts, table, make("p", { class: "quiet" }, "The target here is small, so drafting by a model costs a large part of a step; beside a target of some billions it costs little. Of each step the least time of several runs counts."));
  draw();
}, "Which one should I take?", "outpace drafters MODEL --measure runs them with your model. Text that repeats its prompt (editing code, summaries, agents) favours lookups, which can be joined with a network: suffix+eagle:…");

chapter("tree", "Trees and batches", [
  "A draft need not be one chain. Where the drafter is unsure between two tokens, it can propose both: a tree. All nodes go through one pass. A mask lets each of them see the committed text, its ancestors and itself; the path that agrees with the target is kept.",
  "Nodes cost arithmetic. Alone on a machine there is spare arithmetic; beside other rows it is used up, and drafts stop paying. Then Outpace drafts less, or nothing.",
], (panel) => {
  const steps = runs.tree.steps.filter((step) => drafted(step).length > 1);
  if (!steps.length) return nothing(panel);
  const view = make("div"), facts = make("p");
  const draw = () => {
    const step = steps[at.value - 1], up = parents(step), n = drafted(step).length, size = Math.min(24, (NARROW ? WIDE : 300) / (n + 1)), below = NARROW ? 22 * (n + 1) + 30 : 0, aside = NARROW ? 0 : 300;
    const depth = []; up.forEach((parent, i) => (depth[i] = parent < 0 ? 1 : depth[parent] + 1));
    const svg = picture(WIDE, Math.max(22 * (n + 1) + 20, below + size * (n + 1) + 24), `A draft of ${n} nodes and its mask`);
    const sees = (node, other) => { for (let each = node; each >= 0; each = up[each]) if (each === other) return true; return other < 0; };
    const y = (node) => 26 + 22 * (node + 1), x = (node) => (node < 0 ? 8 : 8 + 22 * depth[node]);
    for (let node = -1; node < n; node++) {
      const here = path(step).includes(node);
      if (node >= 0) shape(svg, "path", { class: "grid", d: `M${x(up[node])} ${y(up[node])}V${y(node)}H${x(node)}` });
      shape(svg, "circle", { class: node < 0 ? "dot" : here ? "r" : "q", cx: x(node), cy: y(node), r: 5 });
      shape(svg, "text", { x: x(node) + 11, y: y(node) + 4, ...(node < 0 || here ? { "font-weight": 700 } : { class: "dim" }) }, node < 0 ? "pending" : visible(word(drafted(step)[node])).slice(0, 18));
      for (let other = -1; other < n; other++) shape(svg, "rect", { class: sees(node, other) ? "one" : "cell", x: aside + size * (other + 1), y: below + 20 + size * (node + 1), width: size - 2, height: size - 2, rx: 2 });
    }
    shape(svg, "text", { class: "dim", x: aside, y: below + 12 }, "row: a token; column: what it sees");
    view.replaceChildren(svg);
    const rows = readers.value, alone = costOf(runs.cost, rows), drafts = costOf(runs.cost, rows * (n + 1)), won = gained(step).length;
    facts.textContent = `${n} nodes, ${path(step).length} accepted, ${countOf(won, "token")} gained. With ${countOf(rows, "row")} and ${n} drafted in each, a pass has ${rows * (n + 1)} tokens: about ${fixed(drafts / alone)} times a plain pass of ${rows}. To pay, a step must bring more than ${fixed(drafts / alone)} tokens a row, drafting aside.`;
  };
  const at = slider("step of the run", { min: 1, max: steps.length, value: 1 + Math.max(0, steps.findIndex((step) => path(step).length > 1)) }, draw);
  const readers = slider("rows at once", { min: 1, max: 8, value: 1 }, draw);
  panel.append(make("p", { class: "quiet" }, `Drafts by ${drafterOf(runs.trees)}.`), at.label, readers.label, view, facts);
  draw();
}, "Does a tree change the output?", "No. The target's choice after a prefix does not depend on what else was drafted. A tree only makes it likelier that the choice is among the drafted tokens.", "walk");

chapter("yours", "Your model", [
  "Everything on this page can be run on your machine, with your model. Whether drafting pays there depends on three numbers: the acceptance, what a drafted token costs, and how flat the cost of a wide pass is.",
  "Outpace measures the last two, learns the first while it decodes, and drafts nothing where that is faster.",
], (panel) => {
  const input = make("input", { type: "text", value: "demo", "aria-label": "model" }), commands = make("pre");
  const draw = () => {
    const name = input.value.trim() || "demo", model = /^[\w./:@-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\\''")}'`;
    commands.textContent = [
      ["the best k, from costs measured there", `outpace plan -m ${model} --acceptance ${fixed(a.value)}`],
      ["which drafter is fastest", `outpace drafters ${model} --measure`],
      ["both speeds, and what explains them", `outpace generate "Why is the sky blue?" -m ${model} --compare`],
      ["plain and drafted, side by side", `outpace race "Why is the sky blue?" -m ${model}`],
      ["this page", `outpace learn --record -m ${model} -d ngram -d suffix`],
    ].map(([what, command]) => `# ${what}\n${command}`).join("\n\n");
  };
  input.addEventListener("input", draw);
  const a = slider("a, acceptance", { min: 0, max: 0.99, step: 0.01, value: 0.7, show: percentOf }, draw);
  panel.append(make("label", {}, make("span", {}, "model (name, folder or .gguf)"), input, make("output")), a.label, commands);
  draw();
}, "How do I know that nothing changed?", "outpace generate --compare decodes plainly, too, and compares all tokens; outpace verify does so over many prompts.");

/** Plain and drafted at their measured speeds: when each token came. */
function race() {
  const names = Object.keys(runs.who).filter((name) => name !== "none");
  const times = (run) => { let at = 0; return run.steps.flatMap((step) => { at += took(step); return gained(step).map(() => at); }); };
  const lanes = [make("p", { class: "text" }), make("p", { class: "text" })], clocks = [make("p", { class: "quiet" }), make("p", { class: "quiet" })];
  const who = chooser("drafter", names.map((name) => [name, name]), () => show(Infinity));
  const fastest = names.reduce((best, name) => (rate(runs.who[name]) > rate(runs.who[best]) ? name : best));
  who.select.value = fastest;
  let frame = 0;
  const show = (now) => [plain, runs.who[who.value]].every((run, i) => {
    const at = times(run), n = at.filter((time) => time <= now).length;
    lanes[i].textContent = textUpTo(run, n);
    clocks[i].textContent = `${n} of ${at.length} tokens, ${(Math.min(now, at[at.length - 1]) / 1e3).toFixed(2)} s`;
    return n === at.length;
  });
  const button = make("button", { type: "button", id: "start" }, "Start");
  button.onclick = () => {
    cancelAnimationFrame(frame);
    const begun = performance.now();
    const tick = () => { if (!show(performance.now() - begun)) frame = requestAnimationFrame(tick); };
    tick();
  };
  show(Infinity);
  return make("section", { id: "race" }, make("h2", {}, "A race"),
    make("p", {}, "Both were decoded one after the other on one machine, and are replayed here at their measured speeds. ", make("code", {}, "outpace race"), " decodes both live."),
    make("div", { class: "panel" }, who.label, button, make("div", { class: "lanes" },
      make("div", {}, make("h3", {}, "plain"), clocks[0], lanes[0]), make("div", {}, make("h3", {}, "drafted"), clocks[1], lanes[1]))));
}

function begin() {
  const { model, machine, outpace } = runs.about;
  document.getElementById("about").textContent = `Recorded with ${model.name} (${model.layers} layers, ${model.dtype}) on ${machine.model}, ${countOf(model.threads, "thread")}, outpace ${outpace}. ${runs.note || ""}`;
  const main = document.getElementById("chapters"), contents = document.getElementById("contents");
  CHAPTERS.forEach(({ id, title, words, build, question, answer, code }, i) => {
    const panel = make("div", { class: "panel" });
    const section = make("section", { id, "aria-labelledby": `h-${id}` }, make("h2", { id: `h-${id}` }, `${i + 1}. ${title}`), ...words.map((text) => make("p", {}, text)), panel,
      make("details", { class: "answer" }, make("summary", {}, question), make("p", {}, answer)));
    if (code) section.append(make("details", { class: "answer" }, make("summary", {}, "The code that does it"), make("pre", {}, runs.code[code])));
    main.append(section);
    build(panel);
    contents.append(make("a", { href: `#${id}` }, `${i + 1}. ${title}`));
  });
  main.append(race());
  contents.append(make("a", { href: "#race" }, "A race"));
  document.getElementById("theme").onclick = () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  };
}

begin();
