"use strict";
// The page of a language run: score or complete a text, see where tokens came from, and change
// what the memory holds. All requests go to the service that served the page.

const find = (id) => document.getElementById(id);
const ORIGINS = 5;
const SMALL_MOVE = 0.1, LARGE_MOVE = 1; // nats
let model = "";
let last = null; // what to do again after the memory has changed
let before = null; // perplexity before that

async function call(path, body) {
  const token = sessionStorage.getItem("token");
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const options = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) };
  const answer = await fetch(path, options);
  const content = await answer.json().catch(() => ({}));
  if (answer.status === 401) {
    find("login").hidden = false;
    find("token").focus();
  }
  if (!answer.ok) {
    const error = content.error;
    throw new Error((error && error.message) || error || `the service answered ${answer.status}`);
  }
  return content;
}

// Run something that waits for the service, with the buttons disabled meanwhile.
async function run(what, action) {
  const buttons = document.querySelectorAll("main button");
  find("error").hidden = true;
  find("busy").textContent = `${what} …`;
  buttons.forEach((button) => { button.disabled = true; });
  try {
    await action();
  } catch (error) {
    find("error").textContent = error.message;
    find("error").hidden = false;
  } finally {
    find("busy").textContent = "";
    document.querySelectorAll("main button").forEach((button) => { button.disabled = false; });
  }
}

function make(kind, text, attributes = {}) {
  const element = document.createElement(kind);
  element.textContent = text;
  Object.assign(element, attributes);
  return element;
}

function shade(moved) {
  if (Math.abs(moved) < SMALL_MOVE) return "";
  return `${moved > 0 ? "helped" : "hurt"}-${Math.abs(moved) >= LARGE_MOVE ? 2 : 1}`;
}

function showTokens(tokens, prompt) {
  const shown = tokens.map((token) => {
    // Not a button element, at which lines would break in the middle of a word.
    const button = make("span", token.text, { className: shade(token.moved), tabIndex: 0 });
    button.setAttribute("role", "button");
    button.title = `${token.moved >= 0 ? "+" : ""}${token.moved.toFixed(2)} nats`;
    button.addEventListener("click", () => showOrigins(token, button));
    button.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") button.click();
      if (event.key === " ") event.preventDefault();
    });
    return button;
  });
  find("tokens").replaceChildren(make("span", prompt, { className: "prompt" }), ...shown);
  find("legend").hidden = !tokens.length;
  find("origins").hidden = true;
}

function showOrigins(token, button) {
  find("tokens").querySelectorAll("[role=button]").forEach((each) => each.setAttribute("aria-pressed", each === button));
  const percent = (log) => `${(100 * Math.exp(log)).toFixed(log > -7 ? 1 : 4)}%`;
  find("token-figures").textContent =
    `“${token.text}”: ${percent(token.log_prob_alone)} without the memory, ${percent(token.log_prob)} with it`;
  find("places").replaceChildren(...token.origins.map((origin) => {
    const place = make("li", "");
    if (origin.token !== token.id) place.className = "other";
    place.append(
      make("strong", `${origin.source} `),
      make("span", `weight ${origin.weight.toFixed(2)}`, { className: "quiet" }),
      document.createElement("br"),
      `…${origin.before}`, make("mark", origin.text), `${origin.after}…`,
    );
    return place;
  }));
  if (!token.origins.length) find("places").replaceChildren(make("li", "The memory is empty."));
  find("origins").hidden = false;
}

function showFigures(score) {
  const rows = [["", "model alone", "with memory", "before"]];
  const was = before ? before.perplexity.toFixed(2) : "";
  rows.push(["perplexity", score.perplexity_alone.toFixed(2), score.perplexity.toFixed(2), was]);
  const table = document.createElement("table");
  rows.forEach((row, index) => {
    const line = table.insertRow();
    row.slice(0, before ? 4 : 3).forEach((text, column) => {
      line.append(make(index ? "td" : "th", text, { className: index && column === 2 ? "now" : "" }));
    });
  });
  find("figures").replaceChildren(table);
}

async function score() {
  const text = find("text").value;
  const result = await call("score", { text, origins: ORIGINS });
  showTokens(result.tokens, result.first || "");
  showFigures(result);
  last = { text, perplexity: result.perplexity };
}

async function complete() {
  const prompt = find("text").value;
  const result = await call("v1/completions", {
    model, prompt, max_tokens: Number(find("count").value), temperature: 0, mbpa: { origins: ORIGINS },
  });
  showTokens(result.choices[0].mbpa.tokens, prompt);
  find("figures").replaceChildren();
  last = null;
}

// After the memory has changed: list the documents, and score the same text again.
async function refresh() {
  await listDocuments();
  if (last && last.text === find("text").value) {
    before = last;
    await score();
    before = null;
  }
}

async function listDocuments() {
  const { sources } = await call("sources");
  find("documents").replaceChildren(...sources.map((source) => {
    const item = document.createElement("li");
    const forget = make("button", "Forget", { type: "button" });
    forget.setAttribute("aria-label", `Forget ${source.name}`);
    forget.addEventListener("click", () => run(`forgetting ${source.name}`, async () => {
      await call("forget", { source: source.name });
      await refresh();
    }));
    item.append(
      make("span", source.name, { className: "name" }),
      make("span", `${source.tokens.toLocaleString("en")} tokens`, { className: "quiet" }),
      forget,
    );
    return item;
  }));
  find("no-documents").hidden = sources.length > 0;
}

async function learn() {
  const source = find("name").value.trim();
  await call("learn", { text: find("document").value, source });
  find("learn").reset();
  find("add").open = false;
  await refresh();
}

async function start() {
  const models = await call("v1/models");
  model = models.data[0].id;
  find("model").textContent = model;
  await listDocuments();
}

find("score").addEventListener("click", () => run("scoring", score));
find("complete").addEventListener("click", () => run("writing", complete));
find("learn").addEventListener("submit", (event) => {
  event.preventDefault();
  run("reading", learn);
});
find("file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  find("document").value = await file.text();
  if (!find("name").value) find("name").value = file.name;
});
find("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", find("token").value);
  find("login").hidden = true;
  run("connecting", start);
});
run("connecting", start);
