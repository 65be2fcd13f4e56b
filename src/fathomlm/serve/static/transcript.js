// Turns as they stand on the page. Text of a model or a user is never markup: it only ever becomes text nodes.

import { paint } from "./colours.js";
import { agreement, depthName, facts, saved, tally, tokenDetails } from "./words.js";

const HOLDER = document.getElementById("turns");
const DETAILS = document.getElementById("details");

// On a small screen the page scrolls, elsewhere the transcript does.
const scroller = () => (getComputedStyle(HOLDER).overflowY === "visible" ? document.scrollingElement : HOLDER);

// Draws something and stays at the end of the text, unless somebody has scrolled up to read.
function follow(draw) {
  const box = scroller();
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  draw();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

// `act` has onEdit(index, text), onRetry(index) and onCopy(index, button).
export function drawConversation(conversation, act) {
  HOLDER.replaceChildren();
  if (!conversation.turns.length) {
    const chat = "Say something. Each token of the reply appears in the color of its depth.";
    const prompt = "Write the beginning of a text. The model continues it, and each token appears in the color of its depth.";
    HOLDER.append(make("p", "empty", conversation.kind === "chat" ? chat : prompt));
  }
  conversation.turns.forEach((turn, index) => {
    const element = drawTurn(conversation, index, act);
    for (const reply of turn.replies) drawReply(element, conversation, turn, reply);
    if (turn.error) drawError(element, turn.error);
    settleTurn(element, turn);
  });
  HOLDER.scrollTop = HOLDER.scrollHeight;
}

export function drawTurn(conversation, index, act) {
  HOLDER.querySelector(".empty")?.remove();
  const turn = conversation.turns[index];
  const article = make("article", "turn");
  article.setAttribute("aria-label", `Turn ${index + 1}`);
  if (conversation.kind === "chat") {
    const said = make("div", "user");
    said.append(make("h3", "", "You"), make("p", "words", turn.user));
    article.append(said);
  }
  const actions = make("div", "actions");
  for (const [name, run] of [["Edit", () => edit(article, turn.user, (text) => act.onEdit(index, text))], ["Retry", () => act.onRetry(index)], ["Copy", (event) => act.onCopy(index, event.currentTarget)]]) {
    const button = make("button", name.toLowerCase(), name);
    button.type = "button";
    button.addEventListener("click", run);
    actions.append(button);
  }
  article.append(make("div", "sides"), make("p", "agreement note"), actions);
  HOLDER.append(article);
  return article;
}

// What follows a turn goes with it when it is written again.
export function turnElements() {
  return [...HOLDER.querySelectorAll(".turn")];
}

export function drawReply(article, conversation, turn, reply) {
  const element = make("article", "reply");
  const text = make("div", "text");
  text.tabIndex = 0;
  text.setAttribute("aria-label", `Reply of ${reply.title}, colored by depth`);
  text.addEventListener("keydown", walk);
  if (conversation.kind !== "chat") text.append(make("span", "given", turn.user));
  element.append(make("h3", "", reply.title), text, make("p", "depths"), make("p", "facts"), make("p", "saved note"));
  article.querySelector(".sides").append(element);
  for (const token of reply.tokens) drawToken(element, reply, token);
  tell(element, reply, turn);
  return element;
}

export function drawToken(element, reply, token) {
  const span = make("span", "token", token.text);
  if (token.depth !== null) paint(span, reply.shape, token.depth);
  span.addEventListener("pointerenter", () => choose(span));
  span.fathom = [token, reply.shape];
  follow(() => element.querySelector(".text").append(span));
}

export function tell(element, reply, turn) {
  follow(() => tellNow(element, reply, turn));
}

function tellNow(element, reply, turn) {
  reply.facts = facts(reply, turn.limit);
  element.querySelector(".facts").textContent = reply.facts;
  const chips = tally(reply.tokens).map(([depth, many]) => {
    const chip = make("span", "chip", `${depthName(reply.shape, depth)}: ${many}`);
    paint(chip, reply.shape, depth);
    return chip;
  });
  element.querySelector(".depths").replaceChildren(...chips);
  element.querySelector(".saved").textContent = reply.finish ? saved(reply.tokens, reply.shape) : "";
}

export function drawError(article, message) {
  article.querySelector(".sides").append(make("p", "failed", `No reply: ${message}`));
}

// When all replies are there: where two part.
export function settleTurn(article, turn) {
  if (turn.replies.length < 2 || turn.error) return;
  const [same, words] = agreement(...turn.replies);
  for (const reply of article.querySelectorAll(".reply")) {
    const tokens = [...reply.querySelectorAll(".token")];
    for (const token of tokens.slice(same)) token.classList.add("differs");
    tokens[same]?.classList.add("parts");
  }
  follow(() => { article.querySelector(".agreement").textContent = words; });
}

function edit(article, text, send) {
  if (article.querySelector(".editor")) return;
  const form = make("form", "editor");
  const area = make("textarea");
  area.value = text;
  area.rows = 3;
  area.setAttribute("aria-label", "Edit the message");
  const [go, back] = [make("button", "", "Send"), make("button", "cancel", "Cancel")];
  [go.type, back.type] = ["submit", "button"];
  back.addEventListener("click", () => form.remove());
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") form.remove();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(area.value);
  });
  const row = make("div", "row");
  row.append(go, back);
  form.append(area, row);
  article.prepend(form);
  area.focus();
}

function choose(span) {
  for (const other of document.querySelectorAll(".token.chosen")) other.classList.remove("chosen");
  span.classList.add("chosen");
  DETAILS.textContent = tokenDetails(...span.fathom);
}

function walk(event) {
  if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
  const tokens = [...event.currentTarget.querySelectorAll(".token")];
  if (!tokens.length) return;
  const at = tokens.findIndex((token) => token.classList.contains("chosen"));
  const next = tokens[Math.min(Math.max(at + (event.key === "ArrowRight" ? 1 : -1), 0), tokens.length - 1)];
  choose(next);
  next.scrollIntoView({ block: "nearest" });
  event.preventDefault();
}
