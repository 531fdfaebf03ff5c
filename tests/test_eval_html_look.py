"""Look of report.html: readable colors, and its rendering in a browser."""

import re
import shutil
import subprocess

import numpy as np
import pytest
from eval_runs import MANIFEST, make_runs, read_back, source

from pipedraft.eval.charts import THEMES
from pipedraft.eval.report import build_page


def linear(color: str) -> np.ndarray:
    share = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """Contrast ratio by WCAG 2.2."""
    shades = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (first, second))
    return (shades[1] + 0.05) / (shades[0] + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colors_can_be_read(scheme: int) -> None:
    theme = {name: colors[scheme] for name, colors in THEMES.items()}
    marks = [name for name in theme if name.startswith("series")]
    for behind in ("paper", "panel"):
        for name in ("ink", "faint", "link", "alarm"):
            assert contrast(theme[name], theme[behind]) >= 4.5, (name, behind)
        for name in marks:
            assert contrast(theme[name], theme[behind]) >= 3, (name, behind)


BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
# Finds elements off the screen, text over text in a plot, plots without marks.
PROBE = """
function probe(view) {
  const page = view.document, root = page.documentElement, problems = [];
  const limit = root.clientWidth;
  if (root.scrollWidth > limit) problems.push("wider than the screen");
  for (const details of page.querySelectorAll("details")) details.open = true;
  for (const box of page.querySelectorAll(".scroll"))
    if (box.scrollWidth > box.clientWidth + 1)
      problems.push("table cut off: " + box.getAttribute("aria-label"));
  const plots = page.querySelectorAll("svg.plot");
  if (plots.length < 5) problems.push(plots.length + " plots");
  for (const plot of plots) {
    const name = plot.parentElement.getAttribute("aria-label") + ": ";
    if (!plot.outerHTML.match(/(fill|stroke): var\\(--series/)) problems.push(name + "no marks");
    const frame = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll("text")].filter((text) => text.textContent);
    const boxes = texts.map((text) => text.getBoundingClientRect());
    boxes.forEach((box, i) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
          box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        problems.push(name + texts[i].textContent + " is cut off");
      boxes.slice(0, i).forEach((other, j) => {
        const wide = Math.min(box.right, other.right) - Math.max(box.left, other.left);
        const high = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
        if (wide > 1 && high > 3)
          problems.push(name + texts[i].textContent + " over " + texts[j].textContent);
      });
    });
  }
  return limit + ": " + (problems.join("; ") || "fine");
}
onload = () => { document.title = [frames[0], frames[1]].map(probe).join(" | "); };
"""


def everything() -> bytes:
    """A page with every kind of plot, from two folders."""
    runs = read_back(make_runs())
    for run in runs:
        kinds = {"stage": 3.0, "draft": 1.0, "verify": 0.5, "send": 0.2, "wait": 2.0}
        names = ("rank 0 (controller and stage 0)", "rank 1 (stage 1)")
        run["processes"] = [{"name": n, "seconds": kinds, "peak_rss_mb": 400.0} for n in names]
        run["tree"] = f"chain:{run['stages']}"
        run["acceptance_by_entropy"] = [
            {
                "entropy_from": low,
                "entropy_to": low + 1,
                "tests": 50,
                "accepts": 40,
                "draft_acceptance_rate": 0.9 - 0.2 * low,
                "draft_acceptance_rate_ci95": [0.85 - 0.2 * low, 0.95 - 0.2 * low],
            }
            for low in range(3)
        ]
    latency = [
        {"method": m, "network": n, "temperature": 0, "ms_per_token": 9.5, "ci95": [9.0, 10.0]}
        for m in ("cloud autoregressive", "picospec")
        for n in ("4g", "wifi", "a measured trace of a train through a tunnel")
    ]
    for run in (more := [dict(run) for run in runs]):
        run["tree"] = f"chain:{2 * run['stages']}"
    return build_page(
        [
            source(runs, "out/first", manifest=MANIFEST, latency=latency),
            source(more, "out/second", manifest=MANIFEST),
        ]
    )


@pytest.mark.all
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_a_browser_shows_everything_on_a_phone_and_on_a_desk(tmp_path) -> None:
    (tmp_path / "inner.html").write_bytes(everything())
    # A headless window is never narrower than 500 px, a frame is.
    frames = [
        f'<iframe src="inner.html" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in (390, 1280)
    ]
    (tmp_path / "outer.html").write_text(
        f"<!DOCTYPE html><title>not run</title>{''.join(frames)}<script>{PROBE}</script>"
    )
    assert BROWSER is not None
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--allow-file-access-from-files"]
    words += ["--window-size=1400,1000", "--dump-dom", (tmp_path / "outer.html").as_uri()]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert shown.returncode == 0, shown.stderr
    (title,) = re.findall(r"<title>(.*?)</title>", shown.stdout)
    assert title == "390: fine | 1280: fine"
