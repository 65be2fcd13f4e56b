// The page: write or talk, watch how deep each token went, compare depths, thresholds and models.
// Plain modules without a build step or dependency: what runs here today runs in ten years.

import { ask, load, write } from "./api.js";
import { look } from "./live.js";
import { asCurl, asMarkdown, asPython, requestOf, textOf } from "./requests.js";
import { depthOf, fitTo, kept, readSettings, remember, reset, restore, seed, setDepth } from "./settings.js";
import { conversations, newConversation, remove, saveConversation, titleOf } from "./store.js";
import { drawConversation, drawError, drawReply, drawToken, drawTurn, make, settleTurn, tell, turnElements } from "./transcript.js";
import { describe, shapeOf, sideTitle } from "./words.js";

const $ = (id) => document.getElementById(id);
const state = { models: [], shapes: {}, model: null, running: null, conversation: newConversation(kept.kind) };
const key = () => $("key").value;
const kindOf = () => document.querySelector("input[name=kind]:checked").value;

// Models.

async function connect() {
  try {
    state.models = (await ask("v1/models", key())).data;
    if (!state.models.length) throw new Error("the model is loading …");
    const names = state.models.map((model) => model.id);
    await choose(names.includes(kept.model) ? kept.model : names[0], names[0]);
  } catch (problem) {
    $("model").textContent = problem.message;
    if (problem.status === 401) $("settings-panel").open = true; // the key is there, and a new one connects again
    else setTimeout(connect, 1000);
  }
}

// What a model is; it is loaded first where it is not.
async function shapeFor(name) {
  if (state.shapes[name]) return state.shapes[name];
  const listed = state.models.find((model) => model.id === name);
  if (!listed.loaded) {
    const size = listed.download ? `; ${Math.round(listed.download / 1e6)} MB are downloaded the first time` : "";
    $("model").textContent = `loading ${name} …${size}`;
    Object.assign(listed, await load(name, key()));
  }
  state.shapes[name] = shapeOf(await ask(`v1/fathom/status?model=${encodeURIComponent(name)}`, key()));
  return state.shapes[name];
}

// Take a model; where it cannot be had, go back to the one before, or another that is there.
async function choose(name, before = state.model) {
  setBusy(true);
  $("model-choice").value = name;
  try {
    await shapeFor(name);
    [state.model, kept.model] = [name, name];
  } catch (problem) {
    if (!before || before === name) throw problem;
    $("problem").textContent = problem.message;
    await shapeFor(before);
    state.model = before;
  } finally {
    setBusy(false);
  }
  showModel();
}

function showModel() {
  const chats = (model) => model.endpoints?.includes("/v1/chat/completions") !== false; // unknown until it is loaded
  const names = state.models.filter((model) => model.id === state.model || state.conversation.kind !== "chat" || chats(model)).map((model) => model.id);
  const size = (model) => (model.loaded ? "" : model.download ? ` (${Math.round(model.download / 1e6)} MB download)` : " (not loaded)");
  $("model-choice").replaceChildren(...state.models.map((model) => new Option(model.id + size(model), model.id)));
  $("model-choice").value = state.model;
  const shape = state.shapes[state.model];
  $("model").textContent = describe(shape);
  fitTo(state.model, shape, names);
  const chat = document.querySelector("input[value=chat]");
  chat.disabled = !shape.chat;
  const stuck = !shape.chat && state.conversation.kind === "chat";
  if (stuck && !state.conversation.turns.length) open(newConversation("prompt"));
  const other = state.models.find((model) => model.id !== state.model && chats(model));
  $("kind-note").textContent = shape.chat ? "" : `${state.model} has no chat template: it continues text.`;
  $("send").disabled = Boolean(state.running) || (stuck && state.conversation.kind === "chat");
  $("to-chat").hidden = shape.chat || !other;
  $("to-chat").textContent = other ? `Chat with ${other.id}` : "";
  $("to-chat").onclick = async () => {
    await choose(other.id);
    if (state.shapes[state.model].chat && state.conversation.kind !== "chat") open(newConversation("chat"));
  };
  remember();
}

// Conversations.

function open(conversation) {
  state.running?.abort();
  state.conversation = conversation;
  kept.kind = conversation.kind;
  kept.conversation = conversation.id;
  document.querySelector(`input[value=${conversation.kind}]`).checked = true;
  const chat = conversation.kind === "chat";
  $("system-control").hidden = !chat;
  if (conversation.turns.length) $("system").value = conversation.system;
  $("prompt-name").textContent = chat ? "Message" : "Text to continue";
  $("prompt").placeholder = chat ? "Message. Enter sends, Shift+Enter is a new line." : "Text to continue. Ctrl+Enter sends.";
  if (!chat && !conversation.turns.length && !$("prompt").value) $("prompt").value = "The sea is deepest where";
  if (chat && $("prompt").value === "The sea is deepest where") $("prompt").value = "";
  $("problem").textContent = "";
  drawConversation(conversation, ACTIONS);
  listConversations();
  if (state.model) showModel();
}

function listConversations() {
  const items = conversations().map((one) => {
    const item = make("li", one.id === state.conversation.id ? "current" : "");
    const [name, away] = [make("button", "title", titleOf(one)), make("button", "away", "×")];
    name.type = away.type = "button";
    away.setAttribute("aria-label", `Delete: ${titleOf(one)}`);
    name.addEventListener("click", () => open(one));
    away.addEventListener("click", () => {
      remove(one.id);
      if (one.id === state.conversation.id) state.conversation.removed = true; // a reply on its way does not bring it back
      if (one.id === state.conversation.id) open(newConversation(one.kind));
      else listConversations();
    });
    item.append(name, away);
    return item;
  });
  $("history").replaceChildren(...items);
  for (const id of ["export-markdown", "export-json"]) $(id).disabled = !state.conversation.turns.length;
}

function save(conversation) {
  if (!saveConversation(conversation)) $("problem").textContent = "this browser's storage is full: the conversation is not kept";
  kept.conversation = state.conversation.id;
  remember();
  listConversations();
}

function download(text, kind, ending) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = `fathomlm-${state.conversation.id}.${ending}`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Writing.

// What is asked: one side, or two where they are compared.
async function sidesOf() {
  const side = async (model, at) => ({ model, shape: await shapeFor(model), depth: depthOf(model, await shapeFor(model), at) });
  const sides = [await side(state.model, 0)];
  if ($("compare").value === "depth") sides.push(await side(state.model, 1));
  if ($("compare").value === "model") sides.push(await side($("other-model").value, 0));
  return sides;
}

async function run(index) {
  const conversation = state.conversation;
  const turn = conversation.turns[index];
  conversation.turns.length = index + 1;
  for (const element of turnElements().slice(index)) element.remove();
  conversation.system = conversation.kind === "chat" ? $("system").value.trim() : "";
  const settings = readSettings();
  Object.assign(turn, { replies: [], error: null, seed: seed(), limit: settings.tokens });
  const element = drawTurn(conversation, index, ACTIONS);
  element.scrollIntoView({ block: "end" });
  $("problem").textContent = "";
  const running = (state.running = new AbortController());
  setBusy(true);
  save(conversation);
  try {
    // One after the other: side by side in time, each would slow the other, and their rates would say nothing.
    for (const side of await sidesOf()) await fill(element, conversation, index, side, settings, running.signal);
  } catch (problem) {
    if (problem.name !== "AbortError") {
      turn.error = problem.message;
      drawError(element, problem.message);
      $("problem").textContent = problem.message;
    }
  } finally {
    if (state.running === running) {
      state.running = null;
      setBusy(false);
      settleTurn(element, turn);
      showModel();
      save(conversation);
      if (!matchMedia("(pointer: coarse)").matches) $("prompt").focus();
    }
  }
}

async function fill(element, conversation, index, { model, shape, depth }, settings, signal) {
  const turn = conversation.turns[index];
  if (conversation.kind === "chat" && !shape.chat) throw new Error(`${model} has no chat template; compare with another model, or in Prompt`);
  const request = requestOf(conversation, index, { model, depth }, shape, settings, turn.seed);
  const reply = { model, depth, title: sideTitle(model, shape, depth), shape, tokens: [], seconds: 0, finish: null };
  let drawn = null;
  conversation.shapes[model] = shape;
  const begun = performance.now();
  const take = (token) => {
    // Nothing of a reply is there before its first token: one that fails leaves nothing behind.
    if (!drawn) drawn = drawReply(element, conversation, turn, reply);
    if (!reply.tokens.length) turn.replies.push(reply);
    reply.tokens.push(token);
    reply.seconds = (performance.now() - begun) / 1000;
    drawToken(drawn, reply, token);
    tell(drawn, reply, turn);
  };
  try {
    reply.finish = await write(request, key(), signal, take);
  } catch (problem) {
    reply.finish = problem.name === "AbortError" ? "stopped" : "broken off";
    throw problem;
  } finally {
    if (!drawn && reply.finish === "stop") {
      drawn = drawReply(element, conversation, turn, reply); // it ended before it began
      turn.replies.push(reply);
    }
    if (drawn) tell(drawn, reply, turn);
  }
}

const ACTIONS = {
  onEdit(index, text) {
    if (state.running) return;
    state.conversation.turns[index].user = text;
    run(index);
  },
  onRetry(index) {
    if (!state.running) run(index);
  },
  onCopy: (index, button) => copy(textOf(state.conversation.turns[index].replies[0]), button),
};

function send(event) {
  event.preventDefault();
  if (state.running || !state.model) return;
  const text = $("prompt").value;
  if (state.conversation.kind === "chat" && !text.trim()) return;
  state.conversation.turns.push({ user: text, replies: [] });
  if (state.conversation.kind === "chat") $("prompt").value = "";
  run(state.conversation.turns.length - 1);
}

function setBusy(busy) {
  for (const id of ["send", "model-choice"]) $(id).disabled = busy;
  $("stop").disabled = !state.running;
  document.body.classList.toggle("busy", busy);
}

// The request that Send would send now, as a command or a program.
function pending() {
  const { kind, system, turns } = state.conversation;
  const shape = state.shapes[state.model];
  const last = turns.length && !$("prompt").value ? turns.at(-1).user : $("prompt").value;
  const before = turns.length && !$("prompt").value ? turns.slice(0, -1) : turns;
  const conversation = { kind, system: kind === "chat" ? $("system").value.trim() : system, turns: [...before, { user: last, replies: [] }] };
  return requestOf(conversation, before.length, { model: state.model, depth: depthOf(state.model, shape, 0) }, shape, readSettings(), seed());
}

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

// Light and dark.

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", String(dark));
  $("theme").textContent = dark ? "Light" : "Dark";
}

const theme = localStorage.getItem("theme");
setTheme(theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  localStorage.setItem("theme", dark ? "dark" : "light");
  setTheme(dark);
});

// What the parts of the page do.

$("form").addEventListener("submit", send);
$("stop").addEventListener("click", () => state.running?.abort());
$("new").addEventListener("click", () => open(newConversation(state.conversation.kind)));
$("forget").addEventListener("click", () => {
  for (const one of conversations()) remove(one.id);
  state.conversation.removed = true;
  open(newConversation(state.conversation.kind));
});
$("export-json").addEventListener("click", () => download(JSON.stringify(state.conversation, null, 2), "application/json", "json"));
$("export-markdown").addEventListener("click", () => download(asMarkdown(state.conversation, titleOf(state.conversation)), "text/markdown", "md"));
$("copy-curl").addEventListener("click", (event) => copy(asCurl(pending(), location.origin, Boolean(key())), event.currentTarget));
$("copy-python").addEventListener("click", (event) => copy(asPython(pending(), location.origin), event.currentTarget));
$("defaults").addEventListener("click", () => {
  reset();
  showModel();
});
$("model-choice").addEventListener("change", () => choose($("model-choice").value).catch((problem) => { $("problem").textContent = problem.message; }));
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("input", (event) => {
  const side = ["depth", "other-depth"].indexOf(event.target.id);
  if (side >= 0) setDepth(state.model, side, Number(event.target.value));
  if (event.target.id === "key" || !state.model) remember();
  else showModel();
});
$("key").addEventListener("change", () => state.model || connect());
for (const radio of document.querySelectorAll("input[name=kind]")) {
  radio.addEventListener("change", () => {
    if (state.conversation.turns.length) open(newConversation(kindOf()));
    else open(Object.assign(state.conversation, { kind: kindOf() }));
  });
}
$("prompt").addEventListener("keydown", (event) => {
  const plain = state.conversation.kind === "chat" && !event.shiftKey && !event.isComposing;
  if (event.key !== "Enter" || !(plain || event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
if (matchMedia("(min-width: 60rem)").matches) for (const id of ["history-panel", "settings-panel"]) $(id).open = true;
restore();
open(conversations().find((one) => one.id === kept.conversation) ?? state.conversation);
connect();
setInterval(() => look(state.model, key()).catch(() => {}), 1000); // the next look may find it again
