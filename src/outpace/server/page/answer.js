// An answer as it grows, and its figures.

const ENOUGH = 32; // tokens from which on a ratio of speeds says something

/** An answer that has said nothing yet. `written`: [text, source] of every token. */
export function emptyAnswer(label) {
  return { label, content: "", reasoning: "", written: [], ids: [], figures: {}, finish: null, error: null };
}

/** Take up one event of its stream. `now`: milliseconds; `begun`: when it was asked. */
export function take(answer, event, now, begun) {
  const figures = answer.figures;
  answer.id = event.id;
  if (event.seed !== undefined) answer.seed = event.seed;
  const choice = event.choices[0];
  if (choice) {
    answer.content += choice.delta.content || "";
    answer.reasoning += choice.delta.reasoning_content || "";
    for (const call of choice.delta.tool_calls || []) answer.content += call.function.name || call.function.arguments;
    answer.finish = choice.finish_reason || answer.finish;
    const ids = choice.token_ids || [];
    answer.ids.push(...ids);
    if (ids.length) {
      if (figures.first === undefined) {
        figures.first = (now - begun) / 1000;
        figures.atFirst = ids.length;
      }
      figures.seconds = (now - begun) / 1000;
    }
  }
  figures.tokens = answer.ids.length;
  const told = event.speculation || (event.usage && event.usage.speculation);
  if (!told) return;
  (told.texts || []).forEach((text, i) => answer.written.push([text, told.sources[i]]));
  if (told.steps === undefined) {
    figures.drafted = (figures.drafted || 0) + (told.drafted_now || 0);
    figures.accepted = answer.written.filter(([, source]) => source !== "target").length;
    figures.steps = answer.written.length - figures.accepted; // each ends with a token of the target's
    return;
  }
  for (const name of ["drafter", "steps", "drafted", "accepted", "off_because"]) figures[name] = told[name];
}

/** The page goes while they are written: what had come is all there will be. */
export function cutOff(message) {
  for (const one of message.plain ? [message.plain, message.answer] : [message.answer]) one.stopped = !one.finish;
  message.content = message.answer.content;
}

/** How many tokens each has written, the busiest first. */
export function shares(answer) {
  const counts = new Map();
  for (const [, source] of answer.written) counts.set(source, (counts.get(source) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

/** Its figures, in words. */
export function told(answer) {
  const { tokens, atFirst, first, seconds, steps, drafted, accepted } = answer.figures;
  if (!tokens) return [];
  const out = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (seconds > first) out.push(`${((tokens - atFirst) / (seconds - first)).toFixed(1)} tokens/s`);
  if (drafted) out.push(`${Math.round((100 * accepted) / drafted)}\u00a0% of drafts accepted`);
  out.push(`first after ${first.toFixed(2)} s`);
  return out;
}

/** What drafting did, in a sentence. */
export function work(answer) {
  const { tokens, steps, drafted, accepted } = answer.figures;
  if (!tokens || !steps) return "";
  if (!drafted) return `The model ran once for each token (${plural(tokens)}): nothing was drafted.`;
  if (!accepted) return `The model ran once for each token (${plural(tokens)}): it agreed with no draft.`;
  return `The model ran ${steps} times for ${plural(tokens)}: it agreed with ${accepted} of ${drafted} drafted ones.`;
}

/** Whether two answers are the same tokens, in words: [identical, sentence]. */
export function compared(plain, fast) {
  const length = Math.min(plain.ids.length, fast.ids.length);
  let at = 0;
  while (at < length && plain.ids[at] === fast.ids[at]) at += 1;
  if (at < length || plain.ids.length !== fast.ids.length) return [false, `They differ from token ${at + 1} on.`];
  const pace = (its) => (its.ids.length - its.figures.atFirst) / (its.figures.seconds - its.figures.first);
  const ratio = pace(fast) / pace(plain);
  const enough = length >= ENOUGH && Number.isFinite(ratio);
  const faster = enough ? `, at ${ratio.toFixed(2)} times the speed this time` : "";
  return [true, `Identical: ${plural(length)}${faster}.`];
}

const plural = (n) => `${n} token${n === 1 ? "" : "s"}`;
