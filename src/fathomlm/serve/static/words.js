// What a model is and what its tokens did, in plain words. Nothing here touches the page.

// All that a saved conversation needs to know of a model, also when the server no longer has it.
export function shapeOf(status) {
  const plan = status.plan;
  const exits = status.kind === "exits";
  return {
    kind: status.kind, steps: plan.unrolled_layers, layers: plan.unique_layers, colours: status.colours,
    deepest: exits ? plan.unrolled_layers : plan.recursions, exit: status.exit_layer, mode: status.decode.at(-1),
    core: plan.recursions > 1 ? (plan.unrolled_layers - plan.unique_layers) / (plan.recursions - 1) : 0,
    allowed: status.max_depth ?? plan.recursions, threshold: status.threshold, chat: status.endpoints.includes("/v1/chat/completions"),
  };
}

export function describe(shape) {
  const layers = shape.steps === shape.layers ? `${shape.layers} layers` : `${shape.layers} layers, run as ${shape.steps}`;
  const how = { routed: "a router gives each token its depth", exits: `tokens may exit after layer ${shape.exit}`, whole: "every token runs all of them" };
  return `${layers}; ${how[shape.kind]}`;
}

// What a reply was made with.
export function sideTitle(model, shape, depth) {
  if (shape.kind === "routed") return depth < shape.allowed ? `${model}, at most ${count(depth, "recursion")}` : `${model}, the router's own depth`;
  if (shape.kind === "exits") return [depth].flat()[0] < 1 ? `${model}, threshold ${depth}` : `${model}, full depth`;
  return model;
}

export function depthName(shape, depth) {
  if (shape.kind === "exits") return depth < shape.deepest ? `exit after layer ${depth}` : `all ${depth} layers`;
  return `depth ${depth}`;
}

export function tally(tokens) {
  const counts = new Map();
  for (const { depth } of tokens) if (depth !== null) counts.set(depth, (counts.get(depth) ?? 0) + 1);
  return [...counts].sort((a, b) => a[0] - b[0]);
}

export function facts(reply, limit) {
  const { tokens, seconds, finish, shape } = reply;
  const known = tokens.filter((token) => token.depth !== null);
  const parts = [count(tokens.length, "token")];
  if (seconds > 0 && tokens.length) parts.push(`${(tokens.length / seconds).toFixed(1)} tokens/s`);
  if (known.length) parts.push(`mean depth ${(sum(known.map((token) => token.depth)) / known.length).toFixed(2)} of ${shape.deepest}`);
  const ends = { stop: "ended by itself or a stop string", length: `cut at ${count(limit, "new token")}`, stopped: "stopped by you" };
  if (finish) parts.push(ends[finish] ?? finish);
  return parts.join(" · ");
}

// What became of a token that an exit chose, by how the server decodes.
const KEPT = {
  parallel: "kept without verification; the layers that they skipped run later, for several tokens at once",
  speculative: "verified by the full model, which would have chosen the same",
  "state-copy": "kept without verification, and deeper layers got the state of the exit",
};

// How much depth was saved: layers that tokens did not wait for.
export function saved(tokens, shape) {
  const counts = tally(tokens);
  const total = sum(counts.map(([, many]) => many));
  if (!total) return shape.kind === "whole" && tokens.length ? `Every token went through all ${shape.steps} layers.` : "";
  const waited = sum(counts.map(([depth, many]) => many * layersAt(shape, depth)));
  const whole = total * shape.steps;
  const part = `${Math.round(100 * (1 - waited / whole))} %`;
  if (shape.kind === "routed") {
    const why = counts.length > 1 ? "the router let some tokens loop fewer times" : `every token looped ${["never", "once"][counts[0][0]] ?? `${counts[0][0]} times`}`;
    return `Depth saved: ${part}. The tokens ran ${waited} layers where full depth runs ${whole}: ${why}.`;
  }
  const early = sum(counts.filter(([depth]) => depth < shape.deepest).map(([, many]) => many));
  if (!early) return `Depth saved: none. All ${count(total, "token")} went through all ${shape.steps} layers.`;
  const rest = total > early ? ` The other ${total - early} went through all ${shape.steps} layers.` : "";
  return `Depth saved: ${part}. Drafted at an exit: ${early} of ${count(total, "token")}, ${KEPT[shape.mode] ?? "kept"}.${rest}`;
}

export function layersAt(shape, depth) {
  return shape.kind === "exits" ? depth : shape.steps - shape.core * (shape.deepest - depth);
}

// How far two replies are the same: the index of the first token that differs, and a sentence.
export function agreement(first, second) {
  const [a, b] = [first.tokens, second.tokens];
  let same = 0;
  while (same < Math.min(a.length, b.length) && a[same].text === b[same].text) same += 1;
  if (same === Math.max(a.length, b.length)) return [same, `Both replies are the same, ${count(same, "token")}.`];
  if (same === 0) return [same, "The replies differ from the first token on."];
  return [same, `The first ${same === 1 ? "token is" : `${same} tokens are`} the same; they part at the framed one, and what follows is underlined.`];
}

export function tokenDetails(token, shape) {
  const words = [`“${token.text}”`];
  if (token.depth !== null) words.push(depthName(shape, token.depth));
  if (token.confidence !== null) words.push(`the exit was ${(100 * token.confidence).toFixed(0)} % sure`);
  if (token.logprob !== null) words.push(`probability ${percent(token.logprob)}`);
  const others = (token.top ?? []).map(([text, value]) => `“${text}” ${percent(value)}`);
  return words.join(" · ") + (others.length ? `. Most likely: ${others.join(", ")}` : "");
}

function percent(logprob) {
  return `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

export function count(many, what) {
  return `${many} ${what}${many === 1 ? "" : "s"}`;
}

function sum(values) {
  return values.reduce((a, b) => a + b, 0);
}
