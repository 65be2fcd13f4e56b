// The playground: write, watch how deep each token went, compare with full depth.
// Plain modules without a build step or dependency: what runs here today runs in ten years.

import { ask, write } from "./api.js";
import { bars, line, share } from "./charts.js";
import { colourOf, paint } from "./colours.js";

const $ = (id) => document.getElementById(id);
const MINUTE = 60;
const state = { status: null, running: null, said: [], rates: [] };

// What the server is.

async function connect() {
  try {
    state.status = await ask("v1/fathom/status", $("key").value);
    $("model").textContent = describe(state.status);
    setDepthControl();
    drawLegend();
  } catch (problem) {
    $("model").textContent = `not connected: ${problem.message}`;
  }
}

function describe(status) {
  const plan = status.plan ?? {};
  const kind = { routed: "routers give each token its depth", exits: "tokens may leave early", whole: "every token runs to the end" };
  return `${status.model ?? "model"}: ${plan.unrolled_layers ?? "?"} steps over ${plan.unique_layers ?? "?"} layers; ${kind[status.kind] ?? ""}`;
}

function deepest() {
  const plan = state.status?.plan ?? {};
  return state.status?.kind === "exits" ? plan.unrolled_layers ?? 1 : plan.recursions ?? 1;
}

// The most that this server lets a request ask for.
function allowed() {
  return state.status?.max_depth ?? deepest();
}

function setDepthControl() {
  const kind = state.status?.kind;
  const control = $("depth-control");
  const slider = $("depth");
  control.hidden = kind !== "routed" && kind !== "exits";
  $("compare").closest("label").hidden = control.hidden;
  if (kind === "routed") {
    Object.assign(slider, { min: 1, max: allowed(), step: 1, value: allowed() });
    $("depth-name").textContent = "Maximum depth";
    $("depth-help").textContent = "No token runs the shared block more often than this.";
    // Routers decide in both texts; what the second one lacks is the limit.
    $("compare-name").textContent = "Beside it, the same without that limit";
    $("second-title").textContent = "Without the limit";
    $("temperature").value = 0.7; // nothing here is about keeping a text, and small models repeat themselves at 0
  } else if (kind === "exits") {
    Object.assign(slider, { min: 0, max: 1, step: 0.01, value: state.status.threshold ?? 0.9 });
    $("depth-name").textContent = "Threshold";
    $("depth-help").textContent = "How sure an exit must be for a token to leave there. 1 never leaves.";
  }
  showDepth();
}

function showDepth() {
  $("depth-value").textContent = $("depth").value;
}

function drawLegend() {
  const legend = $("legend");
  legend.replaceChildren();
  if (state.status?.kind === "whole") return;
  const most = deepest();
  const steps = state.status.kind === "exits" ? [state.status.exit_layer ?? 1, most] : Array.from({ length: most }, (_, i) => i + 1);
  for (const depth of steps) {
    const label = document.createElement("span");
    label.textContent = state.status.kind === "exits" ? `after layer ${depth}` : `depth ${depth}`;
    paint(label, partOf(depth));
    legend.append(label);
  }
}

function partOf(depth) {
  const least = state.status?.kind === "exits" ? state.status.exit_layer ?? 1 : 1;
  return deepest() > least ? (depth - least) / (deepest() - least) : 1;
}

// Writing.

function requestOf(atFullDepth) {
  const text = $("prompt").value;
  const chat = document.querySelector("input[name=kind]:checked").value === "chat";
  const fathom = { depths: true };
  if (atFullDepth) fathom.decode = "full";
  else if (state.status?.kind === "routed") fathom.max_depth = Number($("depth").value);
  else if (state.status?.kind === "exits") fathom.threshold = Number($("depth").value);
  const common = {
    model: state.status?.model, max_tokens: Number($("tokens").value), temperature: Number($("temperature").value),
    seed: Number($("seed").value), stream: true, fathom,
  };
  if (chat) return { ...common, messages: [...state.said, { role: "user", content: text }], logprobs: true, top_logprobs: 4 };
  return { ...common, prompt: text, logprobs: 4 };
}

async function start(event) {
  event.preventDefault();
  if (state.running) return;
  $("problem").textContent = "";
  $("agreement").textContent = "";
  const compare = $("compare").checked && !$("compare").closest("label").hidden;
  $("second").hidden = !compare;
  state.running = new AbortController();
  setBusy(true);
  try {
    const first = await fill($("first"), requestOf(false));
    if (compare) {
      const second = await fill($("second"), requestOf(true));
      tellApart(first, second);
    }
    const chat = document.querySelector("input[name=kind]:checked").value === "chat";
    if (chat) {
      state.said.push({ role: "user", content: $("prompt").value }, { role: "assistant", content: first.text });
      $("prompt").value = "";
    }
  } catch (problem) {
    if (problem.name !== "AbortError") $("problem").textContent = problem.message;
  } finally {
    state.running = null;
    setBusy(false);
  }
}

async function fill(article, request) {
  const holder = article.querySelector(".text");
  holder.replaceChildren();
  const opening = document.createElement("span");
  opening.className = "said";
  opening.textContent = request.messages ? "" : request.prompt;
  holder.append(opening);
  const tokens = [];
  const begun = performance.now();
  const finish = await write(request, $("key").value, state.running.signal, (token) => {
    tokens.push({ ...token, element: show(holder, token, tokens.length) });
    facts(article, tokens, begun, null);
  });
  facts(article, tokens, begun, finish);
  return { tokens, text: tokens.map((token) => token.text).join("") };
}

// Text of a model is never markup: it only ever becomes text nodes.
function show(holder, token, index) {
  const element = document.createElement("span");
  element.className = "token";
  element.textContent = token.text;
  element.dataset.index = index;
  if (token.depth !== null) paint(element, partOf(token.depth));
  element.addEventListener("pointerenter", () => detail(element, token));
  element.fathom = token;
  holder.append(element);
  holder.scrollTop = holder.scrollHeight;
  return element;
}

function facts(article, tokens, begun, finish) {
  const seconds = (performance.now() - begun) / 1000;
  const depths = tokens.map((token) => token.depth).filter((depth) => depth !== null);
  const mean = depths.length ? `, mean depth ${(depths.reduce((a, b) => a + b, 0) / depths.length).toFixed(2)} of ${deepest()}` : "";
  article.querySelector(".facts").textContent =
    `${tokens.length} tokens, ${(tokens.length / seconds).toFixed(1)} tokens/s${mean}${finish ? `, ended by ${finish}` : ""}`;
}

function detail(element, token) {
  for (const other of document.querySelectorAll(".token.chosen")) other.classList.remove("chosen");
  element.classList.add("chosen");
  const words = [`“${token.text}”`];
  if (token.depth !== null) words.push(state.status.kind === "exits" ? `chosen after layer ${token.depth}` : `depth ${token.depth}`);
  if (token.confidence !== null) words.push(`the exit was ${(100 * token.confidence).toFixed(0)} % sure`);
  if (token.logprob !== null) words.push(`probability ${(100 * Math.exp(token.logprob)).toFixed(1)} %`);
  const others = token.top.map(([text, value]) => `“${text}” ${(100 * Math.exp(value)).toFixed(1)} %`);
  $("details").textContent = words.join(" · ") + (others.length ? `. Likeliest: ${others.join(", ")}` : "");
}

function walk(event) {
  if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
  const tokens = [...event.currentTarget.querySelectorAll(".token")];
  if (!tokens.length) return;
  const at = tokens.findIndex((token) => token.classList.contains("chosen"));
  const next = tokens[Math.min(Math.max(at + (event.key === "ArrowRight" ? 1 : -1), 0), tokens.length - 1)];
  detail(next, next.fathom);
  next.scrollIntoView({ block: "nearest" });
  event.preventDefault();
}

function tellApart(first, second) {
  const length = Math.min(first.tokens.length, second.tokens.length);
  let same = 0;
  while (same < length && first.tokens[same].text === second.tokens[same].text) same += 1;
  for (const side of [first, second]) {
    for (const token of side.tokens.slice(same)) token.element.classList.add("differs");
    side.tokens[same]?.element.classList.add("parts");
  }
  if (same === Math.max(first.tokens.length, second.tokens.length)) $("agreement").textContent = `Both texts are the same, ${same} tokens.`;
  else if (same === 0) $("agreement").textContent = "The texts differ from the first token on.";
  else $("agreement").textContent = `The first ${same === 1 ? "token is" : `${same} tokens are`} the same; they part at the framed one, and what follows is underlined.`;
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
}

function clear() {
  state.running?.abort();
  state.said = [];
  for (const side of ["first", "second"]) {
    $(side).querySelector(".text").replaceChildren();
    $(side).querySelector(".facts").textContent = "";
  }
  $("agreement").textContent = "";
  $("problem").textContent = "";
}

// The server now.

async function look() {
  if (document.hidden) return;
  try {
    const status = await ask("v1/fathom/status", $("key").value);
    if (!state.status) await connect();
    state.rates = [...state.rates, status.tokens_per_second ?? 0].slice(-MINUTE);
    $("rate").textContent = (status.tokens_per_second ?? 0).toFixed(1);
    line($("rate-chart"), state.rates, MINUTE, "Tokens per second");
    $("mean").textContent = status.mean_depth ? status.mean_depth.toFixed(2) : "–";
    bars($("depth-chart"), status.depths ?? {}, (depth) => colourOf(partOf(Number(depth))).back, "Tokens by depth");
    const running = status.running ?? 0;
    $("fill").textContent = `${running} of ${status.max_sequences ?? "?"}, ${status.queued ?? 0} waiting`;
    share($("fill-chart"), running, status.max_sequences ?? 1, "Sequences in flight");
  } catch {
    // The next look may find it again; `connect` says what is wrong.
  }
}

// Copying.

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    $("problem").textContent = "the browser did not allow copying";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function asCurl() {
  const request = { ...requestOf(false), stream: false };
  const path = request.messages ? "chat/completions" : "completions";
  const body = JSON.stringify(request).replaceAll("'", "'\\''");
  const key = $("key").value ? ` -H "Authorization: Bearer $KEY"` : "";
  return `curl ${location.origin}/v1/${path}${key} -H 'Content-Type: application/json' -d '${body}'`;
}

function asPython() {
  const { fathom, stream, messages, prompt, ...rest } = requestOf(false);
  const values = Object.entries({ ...rest, ...(messages ? { messages } : { prompt }) });
  const fields = values.map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  const call = messages ? "chat.completions" : "completions";
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key="...")\nanswer = client.${call}.create(\n${fields}\n    extra_body={"fathom": ${python(fathom)}},\n)\nprint(answer.choices[0])\n`;
}

function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v)}`).join(", ")}}`;
  return JSON.stringify(value);
}

// Light and dark.

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", String(dark));
  $("theme").textContent = dark ? "Light" : "Dark";
}

const remembered = localStorage.getItem("theme");
setTheme(remembered ? remembered === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  localStorage.setItem("theme", dark ? "dark" : "light");
  setTheme(dark);
});
$("form").addEventListener("submit", start);
$("stop").addEventListener("click", () => state.running?.abort());
$("clear").addEventListener("click", clear);
$("depth").addEventListener("input", showDepth);
$("key").addEventListener("change", connect);
$("copy-curl").addEventListener("click", (event) => copy(asCurl(), event.currentTarget));
$("copy-python").addEventListener("click", (event) => copy(asPython(), event.currentTarget));
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
for (const text of document.querySelectorAll(".text")) text.addEventListener("keydown", walk);
connect();
look();
setInterval(look, 1000);
