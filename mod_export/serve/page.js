"use strict";
const at = id => document.getElementById(id);
const show = (id, text) => { at(id).textContent = text; };
const headers = () => at("key").value ? { Authorization: `Bearer ${at("key").value}` } : {};
const ms = seconds => Number.isFinite(seconds) ? `${(1000 * seconds).toPrecision(3)} ms` : "-";

// Prometheus's text: name{label="value"} number.
function read(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = line.match(/^mod_export_(\w+?)(?:\{(.*)\})? (\S+)$/);
    if (match) (found[match[1]] ??= {})[match[2] ?? ""] = Number(match[3]);
  }
  return found;
}
const sum = (found, name, label = "") =>
  Object.entries(found[name] ?? {}).reduce((all, [key, value]) => all + (key.includes(label) ? value : 0), 0);

const past = [];
function draw(found) {
  past.push({ when: performance.now() / 1000, found });
  if (past.length > 10) past.shift();
  const before = past[0].found, seconds = past.at(-1).when - past[0].when;
  const grown = (name, label) => sum(found, name, label) - sum(before, name, label);
  const mean = name => grown(`${name}_sum`) / grown(`${name}_count`);
  show("busy", `${sum(found, "busy_rows")} of ${sum(found, "rows")}`);
  show("queue", sum(found, "queue_depth"));
  show("first", ms(mean("time_to_first_token_seconds")));
  show("between", ms(mean("time_between_tokens_seconds")));
  show("rate", seconds ? (grown("tokens_total", 'kind="new"') / seconds).toFixed(0) : "-");
  show("refused", `${sum(found, "refused_requests_total")}, ${sum(found, "texts_total", 'finish="cancelled"')}`);
  const sites = Object.entries(found.site_selected_share ?? {});
  const named = sites.map(([key, share]) => `${key.slice(6, -1)}: ${(100 * share).toFixed(1)} %`);
  if (named.length) show("sites", named.join(" · "));
}

async function watch() {
  try {
    const answer = await fetch("metrics", { headers: headers() });
    if (answer.status === 401) { show("state", "needs an API key"); at("asks").removeAttribute("hidden"); }
    else if (answer.ok) {
      draw(read(await answer.text()));
      const ready = await fetch("v2/health/ready");
      show("state", ready.ok ? "ready" : "not ready: takes no more requests");
    } else show("state", `answers ${answer.status}`);
  } catch { show("state", "does not answer"); }
  setTimeout(watch, 1000);
}

let running = null;
async function write(event) {
  event.preventDefault();
  running?.abort();
  const mine = running = new AbortController();
  at("stop").disabled = false;
  show("text", ""); show("about", "");
  const begun = performance.now();
  let first = null, usage = null;
  try {
    const body = { model: at("form").dataset.model, prompt: at("prompt").value, stream: true,
      stream_options: { include_usage: true }, max_tokens: Number(at("tokens").value),
      temperature: Number(at("temperature").value) };
    const answer = await fetch("v1/completions", { method: "POST", signal: mine.signal, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", ...headers() } });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part; !(part = await reader.read()).done;) {
      const lines = (rest + part.value).split("\n\n");
      rest = lines.pop();
      for (const line of lines.map(one => one.slice(6)).filter(one => one !== "[DONE]")) {
        const chunk = JSON.parse(line);
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) usage = chunk.usage;
        const text = chunk.choices[0]?.text;
        if (text) { first ??= performance.now(); at("text").append(text); }
      }
    }
    const seconds = (performance.now() - begun) / 1000;
    show("about", `${usage.completion_tokens} tokens in ${seconds.toFixed(2)} s, the first text after ` +
      `${ms(((first ?? performance.now()) - begun) / 1000)}`);
  } catch (error) {
    show("about", error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    if (running === mine) at("stop").disabled = true;
  }
}

at("asks").addEventListener("submit", event => event.preventDefault());
at("form")?.addEventListener("submit", write);
at("stop")?.addEventListener("click", () => running?.abort());
watch();
