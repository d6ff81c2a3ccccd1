"""Style and behaviour of the HTML page. The page works without its script: verdict, command and tables are in the HTML."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --raised: #f6f7f9; --ink: #1c2128; --soft: #57606a; --line: #d8dee4; --grid: #e7ebef;
  --link: #0757ba; --good: #116329; --bad: #b3202c; --warn: #7d4e00;
  --good-back: #dcf5e3; --bad-back: #fde3e2; --warn-back: #fbf0cf; --plain-back: #e9edf2;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #0f1318; --raised: #171d24; --ink: #e4e9ee; --soft: #9aa5b1; --line: #303943; --grid: #252d36;
    --link: #79b8ff; --good: #6bdb8b; --bad: #ff8e87; --warn: #ecc567;
    --good-back: #12351f; --bad-back: #431b1c; --warn-back: #3b2d0c; --plain-back: #232b34;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.35rem, 1rem + 2vw, 2rem); line-height: 1.25; margin: .35rem 0 .5rem; letter-spacing: -.01em;
  text-wrap: balance; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0 0 .1rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 46rem; }
a { color: var(--link); }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .86em; }
code { overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.eyebrow { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.badge { display: inline-block; padding: .08rem .6rem; border-radius: 1rem; font-size: .85rem; font-weight: 600;
  background: var(--plain-back); color: var(--ink); margin-right: .35rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.badge.good { background: var(--good-back); } .badge.bad { background: var(--bad-back); }
.badge.warn { background: var(--warn-back); }
.simulated { border: 2px dashed var(--warn); border-radius: .5rem; padding: .5rem .9rem; color: var(--warn); font-weight: 600; }
.command { position: relative; margin: 1rem 0; background: var(--raised); border: 1px solid var(--line); border-radius: .6rem; }
.command pre { margin: 0; padding: .9rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6;
  font-size: .9rem; }
.command button { position: absolute; top: .55rem; right: .55rem; }
.command:has(button) pre { padding-right: 6rem; }
button, select, input { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: .4rem; padding: .3rem .7rem; max-width: 100%; }
button { cursor: pointer; } button:hover { border-color: var(--soft); }
button:focus-visible, select:focus-visible, input:focus-visible, summary:focus-visible, a:focus-visible {
  outline: 2px solid var(--link); outline-offset: 1px; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.number { border: 1px solid var(--line); border-radius: .6rem; padding: .65rem .9rem; background: var(--raised); }
.number b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; line-height: 1.3; }
.number span { color: var(--soft); font-size: .85rem; display: block; line-height: 1.4; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .9rem; margin-top: 1.25rem; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem 1.25rem; margin: .6rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.5rem 1.25rem; }
figure { margin: 0; grid-column: span 2; min-width: 0; } figure.half { grid-column: span 1; }
figcaption { color: var(--soft); font-size: .87rem; max-width: 46rem; margin-top: .35rem; }
.plot { width: 100%; overflow: hidden; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .82rem; vertical-align: bottom; }
th, td { padding: .4rem .7rem .4rem 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; overflow-wrap: break-word; } td.wide, td code { overflow-wrap: anywhere; }
td.right, th.right { text-align: right; white-space: nowrap; }
td.wide { width: 38%; }
tr.good, tr.bad, tr.dim { color: inherit; } tr.dim td { color: var(--soft); }
tr.good td[data-name=""] { color: var(--good); } tr.bad td[data-name=""], tr.bad td[data-name="Kind"] { color: var(--bad); }
tr.out td:first-child { box-shadow: inset 3px 0 0 var(--bad); }
tr td:first-child, tr th:first-child { padding-left: .6rem; }
details > summary { cursor: pointer; overflow-wrap: anywhere; } details[open] > summary { margin-bottom: .4rem; }
details dl { font-size: .85rem; } details pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--raised);
  border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .7rem; margin: .2rem 0; }
.filter { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; margin: .6rem 0; }
.filter input { flex: 1 1 14rem; min-width: 0; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
@media (max-width: 46rem) {
  main { padding: 1rem .9rem 3rem; }
  figure.half { grid-column: span 2; }
  .command:has(button) pre { padding: 3rem .9rem .8rem; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; } dd { margin-bottom: .5rem; }
  table, tbody, tr, td { display: block; width: auto; } thead { display: none; }
  tbody tr { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); margin: .5rem 0; padding: .35rem .2rem;
    border: 1px solid var(--line); border-radius: .5rem; }
  td:first-child, td.wide { grid-column: span 2; } td:empty { display: none; }
  tr.out { border-left: 3px solid var(--bad); } tr.good, tr.bad, tr.dim { color: inherit; } tr.dim td { color: var(--soft); }
tr.good td[data-name=""] { color: var(--good); } tr.bad td[data-name=""], tr.bad td[data-name="Kind"] { color: var(--bad); }
tr.out td:first-child { box-shadow: none; }
  td { overflow-wrap: anywhere; }
  td, td.right, td.wide { border: 0; padding: .12rem .6rem; width: auto; text-align: left; white-space: normal; }
  td[data-name]:not([data-name=""])::before { content: attr(data-name) ": "; color: var(--soft); }
  td:first-child { font-weight: 600; }
  tbody tr[hidden] { display: none; }
}
@media print {
  main { max-width: none; padding: 0; } nav, .filter, .command button { display: none; }
  body { font-size: 10.5pt; } h2 { break-after: avoid; } figure, .number, tr { break-inside: avoid; }
  .command:has(button) pre { padding: .6rem .8rem; }
  a { color: inherit; text-decoration: none; }
  table { font-size: 8.5pt; }
}
"""

SCRIPT = """
"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function themed(layout) {
    const axis = {gridcolor: color("--grid"), linecolor: color("--line"), tickcolor: color("--line")};
    const font = {color: color("--ink"), size: 12, family: getComputedStyle(document.body).fontFamily};
    return Object.assign({}, layout, {
      font: font,
      xaxis: Object.assign({}, layout.xaxis, axis),
      yaxis: Object.assign({}, layout.yaxis, axis),
      hoverlabel: {bgcolor: color("--raised"), bordercolor: color("--line"), font: font, align: "left"},
    });
  }
  const drawn = new Set();
  const settings = {displayModeBar: false, responsive: true};
  // A plot is a drawing of fixed width, and the paper's is not yet laid out when printing begins. A4 and Letter both hold this.
  const PAPER = 640, HALF_PAPER = 305;
  function draw(figure, onPaper) {
    const place = document.getElementById(figure.name);
    if (!place) return;
    drawn.add(figure);
    const layout = themed(figure.layout);
    layout.height = figure.height;
    layout.autosize = onPaper !== true;
    if (onPaper === true) layout.width = place.closest("figure").classList.contains("half") ? HALF_PAPER : PAPER;
    if ((layout.width || place.clientWidth) < 480) {
      // Entries of a legend stand below each other on a phone: room for them comes on top of the plot's own.
      const rows = figure.data.filter(trace => trace.showlegend !== false).length;
      layout.legend = Object.assign({}, layout.legend, {font: {size: 11}});
      layout.height = figure.height + (rows > 1 ? 9 * rows : 0);
    }
    Plotly.react(place, figure.data, layout, settings);
  }
  const watcher = new IntersectionObserver(entries => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(figures.find(figure => figure.name === entry.target.id));
    }
  }, {rootMargin: "600px"});
  figures.forEach(figure => { const place = document.getElementById(figure.name); if (place) watcher.observe(place); });
  dark.addEventListener("change", () => drawn.forEach(figure => draw(figure)));
  window.addEventListener("beforeprint", () => figures.forEach(figure => draw(figure, true)));
  window.addEventListener("afterprint", () => drawn.forEach(figure => draw(figure)));

  document.querySelectorAll("button[data-copy]").forEach(button => {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      const text = document.getElementById(button.dataset.copy).textContent;
      let copied = true;
      try {
        await navigator.clipboard.writeText(text);
      } catch (refused) {
        const area = document.createElement("textarea");
        area.value = text;
        document.body.append(area);
        area.select();
        copied = document.execCommand("copy");
        area.remove();
      }
      button.textContent = copied ? "Copied" : "Press Ctrl-C";
      setTimeout(() => { button.textContent = label; }, 2000);
    });
  });

  const words = document.getElementById("filter-words"), kind = document.getElementById("filter-kind");
  const count = document.getElementById("filter-count");
  if (!words) return;
  const rows = Array.from(document.querySelectorAll("#trials tbody tr"));
  function filter() {
    const wanted = words.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach(row => {
      const text = row.textContent.toLowerCase();
      const fits = kind.value === "" || row.dataset.kind === kind.value || row.dataset.group === kind.value;
      row.hidden = !(fits && wanted.every(word => text.includes(word)));
      if (!row.hidden) shown += 1;
    });
    count.textContent = shown + " of " + rows.length;
  }
  words.addEventListener("input", filter);
  kind.addEventListener("change", filter);
  filter();
})();
"""
