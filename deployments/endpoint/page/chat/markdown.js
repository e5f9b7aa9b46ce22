// Markdown to nodes: markdown-it makes tokens, this file makes elements of them. No string becomes markup.

import { element } from "../shared/elements.js";
import { tex } from "../vendor/markdown-it-tex.js";
import "../vendor/markdown-it.min.js";
import { codeBlock } from "./code_block.js";
import { maths } from "./maths.js";

const LONGEST_MARK = 2000; // characters of a link or a word
const LONGEST_PARAGRAPH = 10_000; // characters; of longer ones the parser would take time in square
const markdown = globalThis.markdownit({ html: false, breaks: true, linkify: true })
  .disable("lheading") // else the first dash of a list would make its introduction a heading
  .use(tex, { delimiters: "all", render: () => "" });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }).add("ftp:", null).add("//", null);
markdown.validateLink = isSafe;
markdown.core.ruler.before("inline", "long paragraphs", keepLongOnes);
markdown.core.ruler.push("tasks", drawTasks);
const normalized = markdown.normalizeLink;
markdown.normalizeLink = (url) => isSafe(url) ? new URL(url).href : normalized(url);

/** Links lead to the web and to e-mail only. The source of others stays text. */
function isSafe(url) {
  return /^(?:https?:\/\/|mailto:)./i.test(url) && URL.canParse(url);
}

/** Makes long paragraphs plain text. */
function keepLongOnes({ tokens }) {
  for (const token of tokens) {
    if (token.type === "inline" && token.content.length > LONGEST_PARAGRAPH) token.type = "text";
  }
}

/** Gives "[ ] " and "[x] " at the beginning of a list's item their boxes. */
function drawTasks({ tokens }) {
  tokens.forEach(({ type, children }, i) => {
    if (type !== "inline" || tokens[i - 2]?.type !== "list_item_open") return;
    const [first] = children;
    if (first?.type === "text") first.content = first.content.replace(/^\[ \] /, "☐ ").replace(/^\[x\] /i, "☑ ");
  });
}

/** Draws changed blocks only, because an answer grows by a word at a time, and nothing where the text is the same. */
export function drawMarkdown(container, text, isGrowing = false) {
  const drawn = `${isGrowing} ${text}`;
  if (container.drawn === drawn) return;
  container.drawn = drawn;
  const blocks = blocksOf(isGrowing ? settled(text) : text, isGrowing);
  let old = container.firstChild;
  for (const block of blocks) {
    const next = old?.nextSibling;
    if (old?.key !== block.key) {
      const node = Object.assign(nodeOf(block), { key: block.key });
      if (old) old.replaceWith(node);
      else container.append(node);
    }
    old = next;
  }
  while (container.childNodes.length > blocks.length) container.lastChild.remove();
}

/** The text without what the next characters may change: the beginning of a table, and of marks at its end. Closes the
 *  code and the bold, struck or italic text that it leaves open. A link that has not ended is its label, and an address
 *  is text. */
function settled(text) {
  if (numFences(text) % 2) return text;
  const begin = text.lastIndexOf("\n\n") + 1;
  const block = text.slice(begin);
  if (/^\n?\s*\|[^\n]*(?:\n[|:\- ]*)?$/.test(block)) return text.slice(0, begin);
  const cut = Math.max(begin, text.length - LONGEST_MARK);
  const end = text.slice(cut)
    .replace(/(?:^|\n)(?:#+|\d+[.)]?|[-+*>])?[ \t]*$/, "")
    .replace(/[*_~`\\[!]{1,3}$/, "")
    .replace(/!?\[([^[\]\n]*)(?:\](?:\([^\s()]*(?:\([^\s()]*\)?[^\s()]*)*)?)?$/, "$1")
    .replace(/(?<!\]\()\b(https?:|mailto:)(\S*)$/i, "$1\u200b$2"); // no link, for this space without a width
  let shown = text.slice(begin, cut) + end;
  for (const mark of ["`", "~~", "**"]) {
    if (shown.split(mark).length % 2 === 0) shown = shown.trimEnd() + mark;
  }
  const begun = shown.match(/(?<=^|[\s(])\*(?=[^\s*])/gm)?.length ?? 0;
  const ended = shown.match(/(?<=[^\s*])\*(?=[\s).,;:!?]|$)/gm)?.length ?? 0;
  if (begun > ended) shown = `${shown.trimEnd()}*`;
  return text.slice(0, begin) + shown;
}

const numFences = (text) => text.match(/^\s*(?:```|~~~)/gm)?.length ?? 0;

/** [{key, tokens, isGrowing}]: the paragraphs, lists, tables and so on. Equal keys mean equal nodes. */
function blocksOf(text, isGrowing) {
  const tokens = markdown.parse(text, {});
  const lines = text.split("\n");
  const blocks = [];
  let begin = 0;
  tokens.forEach((token, i) => {
    if (token.level > 0 || token.nesting > 0) return;
    const isLast = isGrowing && i === tokens.length - 1;
    const [first, end] = tokens[begin].map;
    const key = `${tokens[begin].type} ${isLast} ${lines.slice(first, end).join("\n")}`;
    blocks.push({ key, tokens: tokens.slice(begin, i + 1), isGrowing: isLast });
    begin = i + 1;
  });
  return blocks;
}

function nodeOf({ tokens, isGrowing }) {
  const root = document.createDocumentFragment();
  fill(root, tokens, isGrowing);
  return root.firstChild;
}

function fill(root, tokens, isGrowing) {
  const open = [root];
  for (const token of tokens) {
    if (token.hidden) continue; // a paragraph of a list without gaps
    if (token.nesting < 0) open.pop();
    else if (token.type === "inline") fill(open.at(-1), token.children, isGrowing);
    else {
      const node = (NODES[token.type] ?? plain)(token, isGrowing);
      open.at(-1).append(node);
      // A table stands in a box that scrolls.
      if (token.nesting > 0) open.push(token.type === "table_open" ? node.firstChild : node);
    }
  }
}

const plain = ({ tag }) => element(tag);

function cell(token) {
  const node = element(token.tag);
  node.style.textAlign = token.attrGet("style")?.split(":")[1] ?? "";
  return node;
}

function link(href, ...children) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, ...children);
}

/** How a token becomes a node, where its element alone does not tell. */
const NODES = {
  text: ({ content }) => content.includes("\n") ? element("span.plain", content) : document.createTextNode(content),
  softbreak: () => element("br"),
  code_inline: ({ content }) => element("code", content),
  code_block: ({ content }, isGrowing) => codeBlock(content, "", isGrowing),
  fence: ({ content, info }, isGrowing) => codeBlock(content, info.trim().split(/\s+/)[0], isGrowing),
  heading_open: ({ tag }) => element(`h${Math.min(6, Number(tag[1]) + 2)}`), // beneath the speaker's name
  ordered_list_open: (token) => element("ol", { start: Number(token.attrGet("start") ?? 1) }),
  table_open: () => element("div.table", { tabIndex: 0 }, element("table")),
  th_open: cell,
  td_open: cell,
  link_open: (token) => link(token.attrGet("href")),
  // The page loads nothing from other places.
  image: (token) => link(token.attrGet("src"), token.content || "picture"),
  math_inline: ({ content }) => maths(content, false),
  math_block: ({ content }) => maths(content, true),
};
