// The operator's page: live figures of the whole server.

import { $, copyOf, element } from "../shared/elements.js";
import { askForKey } from "../shared/sign_in.js";

const PERIOD_MS = 2000;
const TIMEOUT_MS = 10_000;
const SILENT_MS = 5000; // from then on the page says that it has no new figures
const HISTORY_MS = 300_000;
const LEAST_HISTORY_MS = 60_000; // what a line that has just begun is drawn in
const GAP_MS = 12_000; // a line does not go on over a longer time without figures
const UNKNOWN = "–";

// ---- Numbers for the reader

const digits = (value, places) =>
  value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
const places = (value) => value >= 100 || Number.isInteger(value) ? 0 : 1;
const count = (value) => value === null ? UNKNOWN : digits(value, 0);
const rate = (value) => digits(value, places(value));

/** `value` in the largest unit that makes it at least 1. Each unit is `step` times the one before. */
function scaled(value, step, units) {
  let unit = 0;
  for (; value >= step && unit < units.length - 1; unit += 1) value /= step;
  return `${rate(value)} ${units[unit]}`.trim();
}

const short = (value) => scaled(value, 1000, ["", "k", "M", "G"]);
const size = (value) => value === null ? UNKNOWN : scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);

/** 0.987 becomes "98.7 %"; 100 % is only for all, and 0 % only for none. */
function percent(share) {
  if (share === null) return UNKNOWN;
  return share === 0 || share === 1 ? `${share * 100} %` : `${digits(Math.min(Math.max(share * 100, .1), 99.9), 1)} %`;
}

function seconds(value) {
  if (value === null) return UNKNOWN;
  if (value < 1) return `${digits(value * 1000, value < .01 ? 1 : 0)} ms`;
  return `${digits(value, value < 10 ? 1 : 0)} s`;
}

/** A duration in its largest unit. */
function duration(value) {
  const [unit, length] = [["d", 86400], ["h", 3600], ["min", 60]].find(([, least]) => value >= least) ?? ["s", 1];
  return `${Math.floor(Math.max(value, 0) / length)} ${unit}`;
}

// ---- The tiles: a figure, and its line over the last five minutes

const waiting = ({ deployments }) =>
  deployments.flatMap(({ works }) => works).reduce((sum, work) => sum + (work.waiting ?? 0), 0);
const latency = (figures, name) => figures.latencies.find((one) => one.name === name) ?? { p50: null, p99: null };

const latencyTile = (name) => ({
  name: `${name}, p99`, value: (figures) => latency(figures, name).p99, show: seconds,
  detail: (figures) => `p50 ${seconds(latency(figures, name).p50)}`,
});

const TILES = [
  { name: "Requests/s", value: ({ requests }) => requests.per_s, show: rate,
    detail: ({ requests }) => `${percent(requests.goodput_ratio)} within SLO` },
  { name: "Tokens/s", value: ({ tokens }) => tokens.generated_per_s, show: rate,
    detail: ({ tokens }) => `and ${rate(tokens.prompt_per_s)} of prompts` },
  latencyTile("TTFT"),
  latencyTile("ITL"),
  { name: "Errors", value: ({ requests }) => requests.error_ratio, show: percent,
    detail: ({ requests }) => `${count(requests.errors)} since the start`, isBad: (value) => value > 0 },
  { name: "Waiting", value: waiting, show: count, detail: () => "in all queues" },
];

const history = []; // {at, figures}, the oldest first
const tiles = TILES.map(makeTile);

function makeTile(tile) {
  const section = copyOf("tile");
  const [title, ...nodes] = section.children;
  title.textContent = tile.name;
  $("noteworthy").before(section);
  return { ...tile, nodes };
}

function drawTile({ value, show, detail, isBad, nodes: [valueNode, detailNode, spark] }, figures) {
  const now = value(figures);
  write(valueNode, show(now));
  valueNode.classList.toggle("bad", isBad?.(now) ?? false);
  write(detailNode, detail(figures));
  spark.lastChild.setAttribute("d", sparkline(value));
}

/** The path of a value's history in a box of 100 by 30, with gaps where there were no figures. */
function sparkline(value) {
  const end = history.at(-1).at;
  const span = Math.max(end - history[0].at, LEAST_HISTORY_MS);
  const points = history.map(({ at, figures }) => ({ at, value: value(figures) })).filter((one) => one.value !== null);
  const most = Math.max(...points.map((one) => one.value), Number.MIN_VALUE);
  return points.map((one, i) => {
    const joins = i > 0 && one.at - points[i - 1].at < GAP_MS;
    const x = 100 * (1 - (end - one.at) / span);
    return `${joins ? "L" : "M"}${x.toFixed(2)} ${(29 - 28 * one.value / most).toFixed(2)}${joins ? "" : "h.01"}`;
  }).join("");
}

// ---- The tables

/** Writes a changed text only, so that a selection stays. */
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A cell is a text, or {text, share, isBad, title}: `share` of its bar is filled, from 0 to 1. */
function fillTable(table, columns, rows) {
  if (!table.tHead) {
    const titles = columns.map((column) =>
      element("th", { scope: "col", className: kindOf(column) }, column.replace("#", "")));
    table.append(element("thead", element("tr", ...titles)), element("tbody"));
  }
  const [body] = table.tBodies;
  while (body.rows.length > rows.length) body.lastChild.remove();
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? body.appendChild(makeRow(columns));
    cells.forEach((cell, j) => fillCell(row.cells[j], typeof cell === "string" ? { text: cell } : cell));
  });
}

function makeRow([, ...columns]) {
  const cells = columns.map((column) => element("td", { className: kindOf(column) }, element("span")));
  return element("tr", element("th", { scope: "row", className: "name" }, element("span")), ...cells);
}

function fillCell(node, { text, share = null, isBad = false, title = "" }) {
  write(node.lastChild, text);
  if (node.title !== title) node.title = title;
  node.classList.toggle("bad", isBad);
  let bar = node.querySelector(".bar");
  if (share === null) return bar?.remove();
  if (!bar) {
    bar = element("span.bar", { ariaHidden: "true" }, element("i"));
    node.prepend(bar);
  }
  bar.classList.toggle("full", isBad);
  bar.style.setProperty("--share", `${Math.min(Math.max(share, 0), 1) * 100}%`);
}

const barred = (share) => share === null ? UNKNOWN : { text: percent(share), share, isBad: share >= .9 };

function deploymentRows({ deployments }) {
  return deployments.flatMap(({ name, replicas, ended, works }) =>
    (works.length ? works : [null]).map((work, i) => [
      { text: name, title: name },
      i ? "" : { text: count(replicas), isBad: replicas === 0 },
      ...(work ? [work.name, count(work.waiting), count(work.in_work), `${rate(work.per_s)} ${work.unit}`]
        : ["", "", "", ""]),
      i || !ended ? "" : count(ended),
    ]));
}

function cacheRows({ caches }) {
  return caches.map((cache) => [
    cache.name,
    percent(cache.hit_ratio),
    { text: cache.num_bytes === null ? `${percent(cache.usage)} of the KV caches`
      : `${size(cache.num_bytes)} of ${size(cache.capacity_bytes)}`, share: cache.usage },
    `${rate(cache.queries_per_s)} ${cache.unit}`,
    cache.evictions === null ? "" : count(cache.evictions),
  ]);
}

function budgetRows({ budgets, waiting_for_room: waits, uploaded_files: files, uploaded_bytes: bytes }) {
  const rows = budgets.map(({ resource, used, limit }) => {
    const show = resource === "bytes" ? size : short;
    return [resource, barred(limit ? used / limit : 0), show(used), show(limit)];
  });
  return [...rows, ["waiting for room", "", count(waits), ""], ["uploaded files", "", count(files), size(bytes)]];
}

const keyRows = ({ keys }) => keys.map((key) => [
  { text: key.name, title: key.name }, rate(key.requests_per_s), rate(key.tokens_per_s), count(key.requests),
  short(key.tokens),
]);

function replicaRows({ replicas }) {
  return replicas.map((one) => [
    { text: `${one.deployment} ${one.name}`, title: one.name },
    ...(one.kv_usage === null ? ["", "", "", ""]
      : [barred(one.kv_usage), count(one.running), count(one.waiting), count(one.waiting_prompt_tokens)]),
    duration(Date.now() / 1000 - one.started_at),
    one.node,
  ]);
}

/** The rows of each table, and its columns: a "#" marks numbers, which are aligned to the right. */
const TABLES = {
  deployments: [deploymentRows, "Deployment", "#Replicas", "Work", "#Waiting", "#In work", "#Per second", "#Ended"],
  caches: [cacheRows, "Cache", "#Hits", "Full", "#Per second", "#Evicted"],
  budgets: [budgetRows, "Resource", "Taken", "#", "#Of"],
  keys: [keyRows, "Key", "#Requests/s", "#Tokens/s", "#Requests", "#Tokens"],
  replicas: [replicaRows, "Replica", "KV cache", "#Running", "#Waiting", "#Prompt tokens", "#Up", "Node"],
};

const kindOf = (column) => column.startsWith("#") ? "number" : "";

// ---- The whole page

function fillList(list, items) {
  while (list.children.length > items.length) list.lastChild.remove();
  items.forEach(({ text, state }, i) => {
    const item = list.children[i]
      ?? list.appendChild(element("li", element("span.dot"), element("span")));
    item.firstChild.hidden = state === undefined;
    item.firstChild.dataset.state = state ?? "";
    item.lastChild.className = state === "good" || state === undefined ? "" : "bad";
    write(item.lastChild, text);
  });
}

function stageItems({ stages }) {
  return stages.map(({ model, name, is_ready: isReady, heartbeat_age_s: age }) => {
    const stage = `${model} ${name}`.trim();
    if (isReady) return { text: stage, state: "good" };
    return { text: `${stage} not ready${age === null ? "" : `, silent for ${duration(age)}`}`, state: "bad" };
  });
}

function noteItems({ requests, tokens, preemptions, recomputed }) {
  const refused = Object.entries(requests.rejections).map(([reason, times]) => `${count(times)} for ${reason}`);
  return [
    ...(refused.length ? [{ text: `Refused for want of room: ${refused.join(", ")}`, state: "bad" }] : []),
    { text: "Since the start:" },
    { text: `${count(requests.ended)} requests ended` },
    { text: `${count(tokens.generated)} tokens generated` },
    { text: `${count(preemptions)} sequences preempted` },
    { text: `${count(recomputed)} calls made again` },
  ];
}

export function show(figures) {
  const now = Date.now();
  history.push({ at: now, figures });
  while (history[0].at < now - HISTORY_MS) history.shift();
  write($("version"), `${figures.version} · operator view`);
  fillList($("stages"), stageItems(figures));
  for (const tile of tiles) drawTile(tile, figures);
  fillList($("notes"), noteItems(figures));
  for (const [id, [rows, ...columns]] of Object.entries(TABLES)) fillTable($(id), columns, rows(figures));
  $("key-use").hidden = !figures.keys.length;
  $("figures").hidden = false;
}

let heardAt = Date.now();
let problem = "";

/** Shows whether the figures are current. */
function showState() {
  const silence = Date.now() - heardAt;
  const isSilent = problem !== "" && silence > SILENT_MS;
  $("silence").hidden = !isSilent;
  if (isSilent) write($("silence"), `No data since ${duration(silence / 1000)}: ${problem}`);
  write($("state"), isSilent ? "No data" : history.length ? "Live" : "Reading");
  $("dot").dataset.state = isSilent ? "bad" : history.length ? "good" : "";
}

async function readFigures() {
  const response = await fetch("/dashboard/data", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (response.ok) return response.json();
  const told = await response.json().then(({ error }) => error.message, () => response.statusText);
  if ([401, 403].includes(response.status)) askForKey(`${told[0].toUpperCase()}${told.slice(1)}.`, () => {});
  throw new Error(`the server answers ${response.status}: ${told}`);
}

const told = (error) => error.name === "TimeoutError" || error.name === "TypeError"
  ? "the server does not answer" : error.message;

/** Resolves when the page is visible: hidden pages read no figures. */
const seen = () => new Promise((resolve) => {
  if (!document.hidden) return resolve();
  document.addEventListener("visibilitychange", () => { heardAt = Date.now(); resolve(); }, { once: true });
});

async function follow() {
  for (;;) {
    const next = new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    try {
      show(await readFigures());
      heardAt = Date.now();
      problem = "";
    } catch (error) {
      problem = told(error);
    }
    showState();
    await next;
    await seen();
  }
}

setInterval(showState, 1000);
follow();
