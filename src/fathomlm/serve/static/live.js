// The server as it is now, once a second.

import { ask } from "./api.js";
import { bars, line, share } from "./charts.js";

const $ = (id) => document.getElementById(id);
const MINUTE = 60;
let rates = [];
let watched = null;

export async function look(model, key) {
  if (document.hidden || !model) return;
  if (watched !== model) [watched, rates] = [model, []];
  const status = await ask(`v1/fathom/status?model=${encodeURIComponent(model)}`, key);
  rates = [...rates, status.tokens_per_second ?? 0].slice(-MINUTE);
  $("rate").textContent = (status.tokens_per_second ?? 0).toFixed(1);
  line($("rate-chart"), rates, MINUTE, "Tokens per second");
  $("mean").textContent = status.mean_depth ? status.mean_depth.toFixed(2) : "–";
  bars($("depth-chart"), status.depths ?? {}, (depth) => (status.colours[Number(depth)] ?? status.colours.at(-1))[0], "Tokens by depth");
  const { drafted = 0, accepted = 0 } = status.totals ?? {};
  $("drafts-figure").hidden = !status.decode?.includes("speculative");
  $("drafts").textContent = drafted ? `${accepted} of ${drafted}` : "none yet";
  share($("drafts-chart"), accepted, drafted, "Drafts kept");
  const running = status.running ?? 0;
  $("fill").textContent = `${running} of ${status.max_sequences ?? "?"}, ${status.queued ?? 0} waiting`;
  share($("fill-chart"), running, status.max_sequences ?? 1, "Running sequences");
}
