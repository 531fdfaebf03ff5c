"""Write results.html, a page with tables to sort and filter, from the CSV files next to it.

python docs/lab/write_results.py --out docs/lab
"""

import argparse
import csv
from pathlib import Path

from jinja2 import Environment, StrictUndefined

TABLES = {
    "results.csv": "A published chat model, SmolLM2-135M-Instruct",
    "results_by_link.csv": "The best method by stages, link and price of a token",
    "results_by_benchmark.csv": "The embedded target, by benchmark",
}
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Measured results</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem auto; max-width: 78rem;
  padding: 0 1rem; }
.scroll { overflow: auto; max-height: 85vh; border: 1px solid #8886; border-radius: .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: Canvas; cursor: pointer; text-align: left; }
th, td { padding: .15rem .5rem; border-bottom: 1px solid #8886; white-space: nowrap; }
td:nth-child(-n+2) { white-space: normal; min-width: 7rem; }
tbody tr:hover { background: #8882; }
input { font: inherit; max-width: 100%; }
@media (max-width: 44rem) { body { font-size: 13px; } th, td { padding: .15rem .3rem; } }
[aria-sort=ascending]::after { content: " \\25b2"; }
[aria-sort=descending]::after { content: " \\25bc"; }
</style>
<h1>Measured results</h1>
<p>Click a heading to sort. <a href="results.md">results.md</a> and
<a href="results_by_benchmark.md">results_by_benchmark.md</a> explain the columns and have the
commands.</p>
<p><label>Show rows with all of these words: <input type="search" autofocus></label></p>
{% for title, lines in tables.items() %}
<h2>{{ title }}</h2>
<div class="scroll" role="region" aria-label="{{ title }}" tabindex="0">
<table>
<thead><tr>
{% for name in lines[0] %}<th scope="col" tabindex="0">{{ name }}</th>{% endfor %}
</tr></thead>
<tbody>
{% for line in lines[1:] %}
<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
<script>
const order = new Intl.Collator("en", { numeric: true });
function sort(head) {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  for (const other of head.parentNode.cells) other.ariaSort = null;
  head.ariaSort = sign > 0 ? "ascending" : "descending";
  const text = row => row.cells[column].textContent;
  const compare = (a, b) => (!text(a) - !text(b)) ||
    sign * (text(a) - text(b) || order.compare(text(a), text(b)));
  body.append(...[...body.rows].sort(compare));
}
for (const head of document.querySelectorAll("th")) {
  head.onclick = () => sort(head);
  head.onkeydown = event => { if (event.key === "Enter") sort(head); };
}
document.querySelector("input").oninput = event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const row of document.querySelectorAll("tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
};
</script>
</html>
"""


def main() -> None:
    description, _, example, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=description, epilog=f"example: {example}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the page")
    out = parser.parse_args().out
    tables = {}
    for name, title in TABLES.items():
        with Path(__file__).with_name(name).open(newline="") as file:
            tables[title] = list(csv.reader(file))
    template = Environment(
        undefined=StrictUndefined, autoescape=True, trim_blocks=True
    ).from_string(PAGE)
    (out / "results.html").write_text(template.render(tables=tables))


if __name__ == "__main__":
    main()
