// How an answer came: its times in one line, and the waterfall of its stages.

import { copyOf, element } from "../shared/elements.js";
import { preference } from "../shared/preferences.js";
import { duration } from "./time.js";

// The server reports the duration of each stage, not its start. The stages up to the embeddings are laid out from the
// arrival on, the others backwards from the first token. Overlaps are visible.

/** [{name, label, start, time, cached}], in seconds and pictures. */
function stagesOf(timings, numPictures) {
  const time = (...names) => names.reduce((sum, name) => sum + (timings.seconds[name] ?? 0), 0);
  const first = timings.time_to_first_token;
  const numEncoded = timings.embedding_cache_hits;
  const media = time("media_fetch", "media_decode");
  const processed = media + time("processor");
  const encode = time("transfer_pixels", "encode_queue", "encode");
  const stage = (label, start, duration, cached = 0, name = label.toLowerCase()) =>
    ({ name, label, start: Math.max(0, start), time: duration, cached });
  const back = (label, last, ...later) => stage(label, first - time(last, ...later), time(last));
  const handOver = stage("Hand-over", first - time("transfer_embeddings", "llm_queue", "prefill"),
    time("transfer_embeddings"), 0, "transfer");
  const ofPictures = [
    stage("Media", 0, media),
    stage("Processor", media, time("processor"), numEncoded + timings.processor_cache_hits),
    stage("Encode", processed, encode, numEncoded),
  ];
  const stages = [
    ...(numPictures ? ofPictures : []),
    stage("Prompt", processed, time("render")),
    ...(numPictures ? [handOver] : []),
    back("Queue", "llm_queue", "prefill"),
    back("Prefill", "prefill"),
    stage("Decode", first, timings.total - first),
  ];
  const pieces = gapsOf(stages, timings.total);
  const between = pieces.reduce((sum, { time: gap }) => sum + gap, 0);
  return [...stages, { name: "calls", label: "Calls", start: 0, time: between, cached: 0, pieces }];
}

/** The times up to `end` in which no stage works: HTTP, routing, and the way from one stage to the next. */
function gapsOf(stages, end) {
  const gaps = [];
  let done = 0;
  for (const { start, time } of stages.toSorted((one, other) => one.start - other.start)) {
    if (start > done) gaps.push({ start: done, time: start - done });
    done = Math.max(done, start + time);
  }
  if (end > done) gaps.push({ start: done, time: end - done });
  return gaps;
}

function drawWaterfall({ timings, numPictures }) {
  const stages = stagesOf(timings, numPictures);
  const end = Math.max(timings.total, ...stages.map(({ start, time }) => start + time)) || 1;
  const percent = (s) => `${(100 * s / end).toFixed(2)}%`;
  const table = copyOf("waterfall");
  table.style.setProperty("--first", percent(timings.time_to_first_token));
  for (const { name, label, start, time, cached, pieces = [{ start, time }] } of stages) {
    const row = copyOf("waterfall-row");
    const [header, track, figure] = row.cells;
    const isCached = cached > 0 && cached >= numPictures;
    const chip = element("span.chip", isCached ? "cached" : `${cached}/${numPictures} cached`);
    header.append(label, ...(cached && !isCached ? [" ", chip] : []));
    figure.append(isCached ? chip : duration(time));
    for (const piece of pieces.filter((one) => one.time > 0)) {
      const bar = element("div.bar");
      const [left, width] = [percent(piece.start), percent(piece.time)];
      Object.assign(bar.style, { left, width, background: `var(--${name})` });
      track.append(bar);
    }
    row.dataset.stage = name;
    table.tBodies[0].append(row);
  }
  return table;
}

/** The times of an answer in one line. The waterfall beneath is open if the reader left the last one open. */
export function drawMeasures(measures) {
  const { timings, usage } = measures;
  const figure = (value, label) => element("span", element("b", value), ` ${label}`);
  const decode = timings.total - timings.time_to_first_token;
  const cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const rate = (usage.completion_tokens - 1) / decode;
  const hasRate = usage.completion_tokens > 2 && decode > 0; // one gap alone is no rate
  const prompt = figure(usage.prompt_tokens, cachedTokens ? `prompt (${cachedTokens} cached) + ` : "prompt + ");
  prompt.append(...figure(usage.completion_tokens, "completion tokens").childNodes);
  const summary = element("summary", figure(duration(timings.time_to_first_token), "to first token"),
    hasRate ? figure(rate.toFixed(rate < 100 ? 1 : 0), "tokens/s") : null, prompt);
  const open = preference("waterfall") === "open";
  const details = element("details.measures", { open }, summary, drawWaterfall(measures));
  summary.onclick = () => {
    preference("waterfall", details.open ? "closed" : "open");
    requestAnimationFrame(() => details.scrollIntoView({ block: "nearest" }));
  };
  return details;
}
