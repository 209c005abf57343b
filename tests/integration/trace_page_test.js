// Runs in the page after its own script: drives it as a person would, and writes what it found into the document.
// The mode is in the address, after "#": "plain" or "hostile".
"use strict";
(async () => {
  const found = [];
  const check = (name, holds) => found.push(`${holds ? "ok" : "FAILED"} ${name}`);
  const by = (id) => document.getElementById(id);
  const press = (key, more = {}) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
  const title = () => by("h-step").textContent;
  const step = () => Number(title().match(/Step ([\d,]+) of/)[1].replaceAll(",", ""));
  const marked = () => Array.from(document.querySelectorAll("#pieces .now"));
  const shown = () => Array.from(document.querySelectorAll("#pieces > div"), (div) => div.textContent).join("");
  const frame = () => new Promise((done) => setTimeout(done, 60));
  const outside = [], refused = [];
  addEventListener("securitypolicyviolation", (event) => refused.push(`${event.violatedDirective} ${event.blockedURI}`));
  const trace = JSON.parse(by("trace").textContent);
  const results = trace.lines.filter((line) => line.result).map((line) => line.result)
    .sort((a, b) => a.request - b.request || a.sample - b.sample);
  const steps = (result) => trace.lines.filter((line) => line.step !== undefined &&
    line.r.some((row) => row.q === result.request && (row.n || 0) === result.sample)).length;
  const rows = trace.lines.filter((line) => line.step !== undefined).flatMap((line) => line.r)
    .filter((row) => row.q === results[0].request && (row.n || 0) === results[0].sample);
  const accepted = rows.map((row) => Math.min((row.h || []).length, row.g ?? row.v.length));
  const mode = location.hash.slice(1);
  try {
    await frame();
    const last = steps(results[0]);
    check("starts at the step that tells most", step() === 1 + telling(state.answer.steps));
    if (mode !== "hostile") check("the text is the answer's", shown() === results[0].text);
    press("End");
    await frame();
    check("End goes to the last step", step() === last);
    const box = marked()[0].getBoundingClientRect(), pane = by("text").getBoundingClientRect();
    check("and brings its tokens into sight", box.top >= pane.top - 1 && box.bottom <= pane.bottom + 1);
    press("ArrowLeft");
    check("left goes back", step() === last - 1);
    press("Home");
    press("ArrowRight");
    press("ArrowRight", { shiftKey: true });
    check("right goes on, ten with shift", step() === Math.min(12, last));
    press("ArrowRight", { ctrlKey: true });
    check("keys of the browser are left alone", step() === Math.min(12, last));

    const drafted = document.querySelectorAll("#pieces span[class^='s']").length;
    check("as many tokens are a drafter's as were accepted", drafted === accepted.reduce((a, b) => a + b, 0));
    let union = 0, trees = 0, words = 0, ticks = 0;
    press("Home");
    for (let i = 1; i <= Math.min(last, 60); i++) {
      union += marked().length;
      const svg = document.querySelector("#tree svg");
      if (svg.querySelectorAll("g").length >= 2 && svg.getAttribute("aria-label")) trees += 1;
      if (svg.textContent.split("✓ accepted").length - 1 === accepted[i - 1]) ticks += 1;
      if (by("why").textContent.length > 20 && document.querySelectorAll("#time li").length >= 1) words += 1;
      press("ArrowRight");
    }
    if (last <= 60) check("the steps' tokens are all tokens", union === results[0].pieces.length);
    check("every step has a tree", trees === Math.min(last, 60));
    check("every tree shows what was accepted", ticks === Math.min(last, 60));
    check("every step has its reasons and times", words === Math.min(last, 60));

    press("Home");
    const span = document.querySelector("#pieces span[data-i='3']");
    span.dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" }));
    check("a token under the pointer selects its step", span.classList.contains("now"));
    span.click();
    check("a click holds it", title().includes("held"));
    document.querySelector("#pieces span[data-i='0']").dispatchEvent(new PointerEvent("pointerover", { bubbles: true, pointerType: "mouse" }));
    check("held, the pointer moves nothing", span.classList.contains("now"));
    press("Escape");
    check("Escape lets go", !title().includes("held"));
    by("slider").value = 2;
    by("slider").dispatchEvent(new Event("input"));
    check("the slider moves", step() === 2);
    by("back").click();
    check("the buttons move", step() === 1);

    if (results.length > 1) {
      press("ArrowDown");
      check("down goes to the next answer", shown() === results[1].text && document.querySelectorAll("#list [aria-current=true]").length === 1);
      press("ArrowUp");
      check("up goes back", shown() === results[0].text);
    }
    const paper = () => getComputedStyle(document.body).backgroundColor;
    const before = paper();
    press("t");
    check("t changes light and dark", paper() !== before);
    press("t");
    check("and back", paper() === before);
    press("?");
    check("? opens help", by("keys").open);
    by("keys").close();

    const nameless = Array.from(document.querySelectorAll("button, input, summary, svg, [tabindex]"))
      .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim()));
    check(`everything has a name ${nameless.map((node) => node.outerHTML)}`, !nameless.length);
    check("nothing is wider than the window", document.documentElement.scrollWidth <= innerWidth);
    outside.push(...performance.getEntriesByType("resource").map((entry) => entry.name));
    check(`nothing was asked for outside ${outside}`, !outside.length);
    check(`the policy had nothing to refuse ${refused}`, !refused.length);

    if (mode === "hostile") {
      check("no text of the trace ran", window.pwned === undefined);
      check("no text of the trace became an element", !document.querySelector("#text b, #text img, #text script, #figures b, #list img"));
      check("direction overrides are spelled out", !shown().includes("\u202e") && shown().includes("U+202E"));
      check("control characters are spelled out", !/[\u0000-\u0008]/.test(shown()) && shown().includes("\u2400"));
      check("joined emoji stay whole", shown().includes("\u{1F469}\u200d\u{1F469}"));
      check("the text between is as it was", shown().includes("<\/script><script>window.pwned=1<\/script>"));
      const image = document.createElement("img");
      image.src = "https://example.com/x.png";
      document.body.append(image);
      await frame();
      check("the policy lets nothing out", refused.some((text) => text.startsWith("img-src")));
    }
  } catch (error) {
    check(`no exception: ${error.stack}`, false);
  }
  by("selftest").textContent = found.join("\n");
  by("selftest").dataset.done = found.some((line) => line.startsWith("FAILED")) ? "failed" : "passed";
})();
document.body.append(Object.assign(document.createElement("pre"), { id: "selftest", hidden: true }));
