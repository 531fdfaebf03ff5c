"""The page of report.html: jinja2 template, style sheet and script, all in the one file.

Colours: text has a contrast of 4.5 or more against the page in both themes, marks 3 or more; series
differ by 20 or more in CIELAB for colour-blind readers too (tests/test_eval_html.py), and by marker
or height besides.
"""

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f4f5f7",
    "ink": "#1c2026",
    "faint": "#5b6470",
    "grid": "#d9dde3",
    "link": "#0b57b0",
    "alarm": "#a3261b",
    "series-1": "#002de3",
    "series-2": "#6e1100",
    "series-3": "#046d4b",
    "series-4": "#b54594",
    "series-5": "#96710b",
    "series-6": "#0086ff",
    "series-7": "#5e279e",
    "series-8": "#4c1842",
}
DARK = {
    "paper": "#15181d",
    "panel": "#20252c",
    "ink": "#e8eaed",
    "faint": "#a4adb8",
    "grid": "#3a414b",
    "link": "#8ab8f5",
    "alarm": "#ff9a8f",
    "series-1": "#b9e3ff",
    "series-2": "#ff8a2f",
    "series-3": "#30b49a",
    "series-4": "#f3e8a1",
    "series-5": "#ac7c49",
    "series-6": "#5b759f",
    "series-7": "#a147e9",
    "series-8": "#b79dff",
}

STYLE = """\
*, *::before, *::after { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); }
body { margin: 0 auto; max-width: 80rem; padding: 1rem 1rem 3rem;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
a { color: var(--link); }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.25rem; margin: 2.25rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p, ul, dl { margin: .5rem 0; max-width: 75ch; overflow-wrap: anywhere; }
header { display: flex; gap: 1rem; justify-content: space-between; align-items: flex-start; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none;
  max-width: none; }
button { font: inherit; color: inherit; background: var(--panel); cursor: pointer;
  border: 1px solid var(--faint); border-radius: .35rem; padding: .25rem .75rem; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.alarm { color: var(--alarm); }
.note { color: var(--faint); }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; max-width: none; }
.facts dt { color: var(--faint); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.command { white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.5 ui-monospace, monospace;
  background: var(--panel); padding: .6rem .8rem; border-radius: .35rem; margin: .5rem 0; }
.scroll { overflow-x: auto; container-type: inline-size; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .4rem; border-bottom: 1px solid var(--grid); text-align: right;
  vertical-align: top; }
td { white-space: nowrap; }
th { vertical-align: bottom; }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: break-word; }
td.text { min-width: 4rem; }
th button { background: none; border: 0; padding: 0; font-weight: 600; text-align: inherit; }
th button::after { content: " \\2195"; color: var(--faint); }
th[aria-sort=ascending] button::after { content: " \\2191"; color: var(--ink); }
th[aria-sort=descending] button::after { content: " \\2193"; color: var(--ink); }
.summary { width: 100%; font-size: .9rem; }
.summary .chart { width: 34%; min-width: 8rem; }
.interval { display: block; width: 100%; height: 1.2rem; overflow: visible; }
.interval .axis { stroke: var(--grid); }
.interval .one { stroke: var(--faint); stroke-dasharray: 3; }
.interval .bounds { stroke: var(--series-1); stroke-width: 4; }
.interval circle { fill: var(--series-1); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 1.5rem; align-items: start; }
figure { margin: 0; padding: 1rem; background: var(--panel); border-radius: .5rem; min-width: 0;
  --paper: var(--panel); }
figure:has(details[open]) { grid-column: 1 / -1; }
figcaption p { font-size: .85rem; color: var(--faint); }
.plot { display: block; width: 100%; height: auto; max-width: 35rem; }
.plot * { stroke-linejoin: round; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .15rem 1rem;
  font-size: .85rem; }
.legend li { display: flex; gap: .4rem; align-items: center; min-width: 0; }
.swatch { width: 28px; height: 16px; flex: none; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--link); font-size: .85rem; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap; }
@media (max-width: 44rem) {
  .facts { grid-template-columns: 1fr; }
  .facts dd { margin-bottom: .4rem; }
  figure { padding: .75rem .5rem; }
}
@media print {
  @page { size: A4 landscape; margin: 12mm; }
  html { color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 9pt; }
  nav, button#theme, th button::after { display: none; }
  th button { display: contents; }  /* else headers are not repeated on every page */
  table { font-size: 7pt; }
  thead { display: table-header-group; }
  tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; container-type: normal; }
  .figures { display: block; }
  figure { display: inline-block; width: 49%; vertical-align: top; break-inside: avoid;
    margin-bottom: 1rem; }
  figure details { display: none; }
  .plot { max-height: 115mm; }
}
"""

# Where a table is wider than its place, each row is a card of names and values. How wide it is
# depends on the number of its columns: few, some or many.
CARDS = """\
@media screen {
  @container (max-width: WIDTH) {
    TABLE, TABLE tbody, TABLE tr, TABLE td { display: block; width: 100%; }
    TABLE thead { display: none; }
    TABLE tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.5rem; padding: .6rem 0;
      border-bottom: 1px solid var(--faint); }
    TABLE td, TABLE td.text { display: flex; justify-content: space-between; gap: .5rem; border: 0;
      min-width: 0; padding: .1rem 0; white-space: normal; overflow-wrap: anywhere;
      text-align: right; }
    TABLE td::before { content: attr(data-label); color: var(--faint); flex: none; }
    TABLE td.text, TABLE td.chart { grid-column: 1 / -1; }
    TABLE td.chart { width: auto; }
    TABLE td.chart::before { content: none; }
  }
}
"""
STYLE += "".join(
    CARDS.replace("TABLE", f"table.{name}").replace("WIDTH", width)
    for name, width in {"few": "20rem", "some": "52rem", "many": "70rem"}.items()
)

SCRIPT = """\
"use strict";
const root = document.documentElement;
const toggle = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
const nameToggle = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
toggle.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  nameToggle();
});
dark.addEventListener("change", nameToggle);
nameToggle();
toggle.hidden = false;

const key = (cell) => {
  const found = cell.textContent.trim().match(/^[[+]?(-?\\d+(\\.\\d+)?)/);
  return found ? Number(found[1]) : null;
};
const compare = (a, b) => {
  const [x, y] = [key(a), key(b)];
  if (x !== null && y !== null) return x - y;
  if (x !== null || y !== null) return x === null ? 1 : -1;
  return a.textContent.localeCompare(b.textContent);
};
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].sort((a, b) => sign * compare(a.cells[column], b.cells[column]));
      body.append(...rows);
    });
  });
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("main > details")) details.open = true;
});
"""

MACROS = """\
{% macro text_class(name) %}{% if name in text_columns %} class="text"{% endif %}{% endmacro %}
{% macro show_table(table, label) %}
{% set columns = table.header | length %}
{% set width = "few" if columns <= 5 else "some" if columns <= 12 else "many" %}
<div class="scroll" role="region" aria-label="{{ label }}" tabindex="0">
<table class="sortable {{ width }}" role="table"><caption class="hidden">{{ label }}</caption>
<thead role="rowgroup"><tr role="row">
{% for name in table.header %}
<th role="columnheader" scope="col"{{ text_class(name) }}>{{ name }}</th>
{% endfor %}
</tr></thead><tbody role="rowgroup">
{% for row in table.rows %}<tr role="row">
{% for cell in row %}
{% set name = table.header[loop.index0] %}
<td role="cell" data-label="{{ name }}"{{ text_class(name) }}>{{ cell }}</td>
{% endfor %}
</tr>{% endfor %}
</tbody></table></div>
{% endmacro %}
{% macro show_facts(facts) %}
<dl class="facts">{% for name, text in facts %}<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}</dl>
{% endmacro %}
"""

SUMMARY = """\
<div class="scroll" role="region" aria-label="L' of every method" tabindex="0">
<table class="summary some" role="table"><caption class="hidden">L' of every method</caption>
<thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col" class="text">method</th>
<th role="columnheader" scope="col">T</th><th role="columnheader" scope="col">L'</th>
<th role="columnheader" scope="col">95 % CI</th>
<th role="columnheader" scope="col" class="chart">from 0 to {{ scale }}; the dashed line is 1</th>
<th role="columnheader" scope="col">lossless</th></tr></thead>
<tbody role="rowgroup">
{% for row in summary %}
<tr role="row"><td role="cell" class="text" data-label="method">{{ row.method }}</td>
<td role="cell" data-label="T">{{ row.temperature }}</td>
<td role="cell" data-label="L'"><strong>{{ row.length }}</strong></td>
<td role="cell" data-label="95 % CI">{{ row.interval }}</td>
<td role="cell" class="chart" data-label=""><svg class="interval" aria-hidden="true">
<line class="one" x1="{{ one }}%" x2="{{ one }}%" y1="0" y2="100%"/>
<line class="axis" x1="0" x2="100%" y1="50%" y2="50%"/>
{% if row.low is not none %}
<line class="bounds" x1="{{ row.low }}%" x2="{{ row.high }}%" y1="50%" y2="50%"/>
{% endif %}
{% if row.point is not none %}
<circle cx="{{ row.point }}%" cy="50%" r="5"/>
{% endif %}
</svg></td>
<td role="cell" data-label="lossless">{{ row.lossless }}</td></tr>
{% endfor %}
</tbody></table></div>
"""

PAGE = (
    """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'sha256-{{ script_hash }}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
:root[data-theme=light] { color-scheme: light; }
:root[data-theme=dark] { color-scheme: dark; }
:root { {% for name, light, dark in colours %}--{{ name }}: light-dark({{ light }}, {{ dark }}); \
{% endfor %} }
{{ style | safe }}
</style>
</head>
<body>
"""
    + MACROS
    + """\
<header><h1>{{ title }}</h1><button id="theme" type="button" hidden>Dark</button></header>
<nav aria-label="Contents"><ul>
{% for section in sections %}<li><a href="#{{ section }}">{{ section }}</a></li>{% endfor %}
</ul></nav>
<main>
{{ show_facts(facts) }}
{% for line in warnings %}<p class="alarm">{{ line }}</p>{% endfor %}
{% if summary %}
<h2 id="Summary">Summary</h2>
<p>L' = n N / K: how many tokens a pipeline of n stages emits in the time in which plain decoding
emits one; all prompts pooled.{% if losses %} {{ losses }}{% endif %}</p>
"""
    + SUMMARY
    + """\
{% endif %}
{% if results %}
<h2 id="Results">Results</h2>
{{ show_table(results, "All results") }}
<details><summary>What the columns mean</summary><dl class="facts">
{% for name, text in legend %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}</dl></details>
{% endif %}
{% if repeats %}
<h3>Repeats</h3><p>{{ repeats_text }}</p>
{{ show_table(repeats, "Repeats") }}
{% endif %}
<h2 id="Plots">Plots</h2>
<div class="figures">
{% for picture in pictures %}
<figure><h3>{{ picture.title }}</h3>
{{ picture.svg | safe }}
<figcaption>
{% if picture.legend %}<ul class="legend">
{% for swatch, text in picture.legend %}
<li>{{ swatch | safe }}<span>{{ text }}</span></li>
{% endfor %}
</ul>{% endif %}
<p>{{ picture.caption }}</p></figcaption>
{% if picture.table %}<details><summary>In numbers</summary>
{{ show_table(picture.table, picture.title + " in numbers") }}</details>{% endif %}
</figure>
{% endfor %}
</div>
{% if missing %}
<p class="note">Left out:</p>
<ul class="note">
{% for entry in missing %}<li>{{ entry.title }}: {{ entry.reason }}.</li>
{% endfor %}</ul>
{% endif %}
{% if comparisons %}
<h2 id="Comparison">Comparison</h2>
{% for comparison in comparisons %}
<h3>{{ comparison.title }}</h3>
{% for line in comparison.warnings %}<p class="alarm">{{ line }}</p>{% endfor %}
{% if comparison.table %}{{ show_table(comparison.table, comparison.title) }}{% endif %}
{% endfor %}
<p class="note">{{ comparison_legend }}</p>
{% endif %}
<h2 id="Provenance">Provenance</h2>
{% for source in sources %}
<h3>{{ source.name }}</h3>
{% if source.command %}<p class="command">{{ source.command }}</p>{% endif %}
{{ show_facts(source.facts) }}
{% if source.settings %}
<details><summary>Settings</summary>{{ show_facts(source.settings) }}</details>
{% endif %}
{% endfor %}
</main>
<script>{{ script | safe }}</script>
</body>
</html>
"""
)
