#!/usr/bin/env python3
"""The pictures of README.md, below docs/pictures: `cargo xtask pictures`.

    docs/benchmarks/*.txt -> move.svg, lanes.svg        cargo xtask demo -> demo.cast -> demo.svg

Charts have the figures of the published tables: both agree. demo.cast is a recording of a real run (asciicast v2), of
which demo.svg has other pauses. With --drawn nothing is run: what was recorded is drawn.
"""

import html
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/pictures"
# Picture: table, beginning of its title, column, groups, labels of rows and what the chart calls them, the text below the bars.
# The last row is towline's.
CHARTS = {
    "move.svg": (
        "live.txt", "Live: ", "downtime, ms", ["4 channels", "without multifd"],
        {"QEMU to QEMU directly": "QEMU's own migrate", "through towline": "towline move"},
        "ms of downtime of a moved guest (median, smallest, largest)",
    ),
    "lanes.svg": (
        "lanes.txt", "Lanes: ", "GB/s", ["warm, 2 lanes", "warm, 4 lanes"],
        {"QEMU's multifd": "QEMU's multifd", "iperf3": "iperf3", "auto": "towline"},
        "GB/s of guest memory over TCP on the loopback interface (median, smallest, largest)",
    ),
}
CHART_STYLE = """
text { fill: #1f2937; font: 12px sans-serif; } .name { font-weight: bold; } .label { text-anchor: end; }
svg { background: #ffffff; } .own { fill: #2563eb; } .peer { fill: #94a3b8; } path { stroke: #1f2937; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb; } svg { background: #111827; } .own { fill: #60a5fa; } .peer { fill: #64748b; } path { stroke: #e5e7eb; }
}
"""
# The demonstration's screen. In the SVG a pause lasts at most PAUSE seconds, and each line at least LINE, in which it can be read.
COLUMNS, ROWS = 100, 28
PAUSE, LINE, END = 1.2, 0.22, 6.0
LINE_PIXELS, LETTER_PIXELS, MARGIN = 18, 8, 14
# A recording begins with this line: set-up and build are before it.
BEGIN = "Files are in "
SCREEN_STYLE = """
svg { background: #111827; } text { fill: #e5e7eb; font: 13px ui-monospace, 'DejaVu Sans Mono', monospace; white-space: pre; }
.command { fill: #60a5fa; } .heading { fill: #facc15; }
@media (prefers-reduced-motion: reduce) { text, #screen { animation: none !important; } }
"""


def escape(text):
    return html.escape(text, quote=False)


def svg(width, height, title, style, body):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n{body}</svg>\n"
    )


def cells(line):
    return [cell.strip() for cell in line.strip().split("  ") if cell.strip()]


def figure(text):
    """`118 (94–195)`, as tables print it: what is shown, the median, the smallest and the largest value."""
    shown, _, spread = text.partition(" ")
    ends = spread.strip("()").split("–") if spread else [shown, shown]
    return shown, float(shown), float(ends[0]), float(ends[1])


def groups_of(text, title, column, groups, rows):
    """The figures of these groups and rows, in the table's order."""
    lines = iter(text[text.index(f"\n{title}"):].splitlines())
    index = cells(next(line for line in lines if line.startswith("what "))).index(column)
    next(lines)
    found, group = {}, None
    for line in lines:
        if not line:
            break
        if not line.startswith(" "):
            group = line
        elif group in groups and cells(line)[0] in rows:
            found.setdefault(group, {})[cells(line)[0]] = figure(cells(line)[index])
    assert list(found) == groups and all(len(found[group]) == len(rows) for group in groups), f"{title}: groups or rows are missing"
    return found


def chart(table, title, column, groups, rows, unit):
    found = groups_of((ROOT / "docs/benchmarks" / table).read_text(), title, column, groups, rows)
    begin, row, width = 160, 26, 880
    scale = (width - begin - 90) / max(high for group in found.values() for *_, high in group.values())
    y, body = 12, ""
    own = list(rows)[-1]
    for name, bars in found.items():
        body += f'<text class="name" x="12" y="{y + 27}">{escape(name)}</text>\n'
        y += row + 10
        for label in bars:
            shown, median, low, high = bars[label]
            kind, middle = ("own" if label == own else "peer"), y + 13
            low, high = (begin + round(value * scale) for value in (low, high))
            body += (
                f'<text class="label" x="{begin - 12}" y="{middle + 4}">{escape(rows[label])}</text>\n'
                f'<rect class="{kind}" x="{begin}" y="{middle - 8}" width="{round(median * scale)}" height="16"/>\n'
                f'<path d="M{low} {middle}H{high}M{low} {middle - 4}v8M{high} {middle - 4}v8"/>\n'
                f'<text x="{high + 8}" y="{middle + 4}">{shown}</text>\n'
            )
            y += row
    body += f'<path d="M{begin} 12V{y}"/>\n<text x="{begin}" y="{y + 17}">{escape(unit)}</text>\n'
    return svg(width, y + 38, escape(unit), CHART_STYLE, body)


def record():
    """Runs the demonstration; its output from BEGIN on, each piece with its time in seconds."""
    demo = subprocess.Popen([os.environ.get("CARGO", "cargo"), "xtask", "demo"], stdout=subprocess.PIPE, cwd=ROOT)
    pieces, rest, begin = [], b"", None
    while piece := os.read(demo.stdout.fileno(), 4096):
        rest += piece
        try:
            text, rest = rest.decode(), b""
        except UnicodeDecodeError:
            continue  # A letter is cut.
        print(text, end="", flush=True)
        if begin is None and BEGIN in text:
            begin, text = time.monotonic(), text[text.index(BEGIN):]
        if begin is not None:
            assert not any(letter < " " and letter != "\n" for letter in text), "the demonstration writes no control characters"
            pieces.append((round(time.monotonic() - begin, 3), text))
    assert demo.wait() == 0 and pieces, "the demonstration failed"
    return pieces


def cast(pieces):
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "idle_time_limit": 2.0, "title": "make demo"}
    events = [[at, "o", text.replace("\n", "\r\n")] for at, text in pieces]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [header, *events])


def shown_lines(pieces):
    """Each line of the screen with its row, its text and the times from and until which it is that; when rows scroll; the end."""
    lines, scrolls, row, now, before, line = [], [], 0, 0.0, 0.0, ""
    for at, text in pieces:
        now += min(at - before, PAUSE)
        before = at
        for letter in text:
            if letter == "\n" or len(line) == COLUMNS:
                now += LINE if letter == "\n" else 0
                row, line = row + 1, ""
                scrolls += [now] if row >= ROWS else []
            if letter == "\n":
                continue
            line += letter
            if lines and lines[-1][0] == row and lines[-1][2] == now:
                lines[-1][1] = line
                continue
            if lines and lines[-1][0] == row:
                lines[-1][3] = now
            lines.append([row, line, now, None])
    return lines, scrolls, now + END


def screen(pieces):
    lines, scrolls, end = shown_lines(pieces)
    percent = lambda at: f"{at / end * 100:.3f}%"
    steps = "".join(f" {percent(at)} {{ transform: translateY(-{(i + 1) * LINE_PIXELS}px); }}" for i, at in enumerate(scrolls))
    style = (
        f"#screen {{ transform: translateY(-{len(scrolls) * LINE_PIXELS}px); animation: scroll {end:.2f}s step-end infinite; }}\n"
        f"@keyframes scroll {{ 0% {{ transform: none; }}{steps} }}\n"
    )
    body = ""
    for i, (row, text, since, until) in enumerate(lines):
        hidden = f" {percent(until)} {{ opacity: 0; }}" if until else ""
        style += (
            f"#l{i} {{ opacity: {0 if until else 1}; animation: k{i} {end:.2f}s step-end infinite; }} "
            f"@keyframes k{i} {{ 0% {{ opacity: 0; }} {percent(since)} {{ opacity: 1; }}{hidden} }}\n"
        )
        kind = ' class="command"' if text.lstrip().startswith("$ ") else "" if text.startswith(" ") else ' class="heading"'
        y = MARGIN + (row + 0.75) * LINE_PIXELS
        body += f'<text id="l{i}" x="{MARGIN}" y="{y}"{kind}>{escape(text)}</text>\n'
    frame = f'<rect width="100%" height="100%" fill="#111827"/>\n<g id="screen">\n{body}</g>\n'
    size = COLUMNS * LETTER_PIXELS + 2 * MARGIN, ROWS * LINE_PIXELS + 2 * MARGIN
    return svg(*size, "make demo", "\n" + style + SCREEN_STYLE, frame)


def main():
    for picture, parts in CHARTS.items():
        (PICTURES / picture).write_text(chart(*parts))
    if sys.argv[1:] != ["--drawn"]:
        (PICTURES / "demo.cast").write_text(cast(record()))
    events = [json.loads(line) for line in (PICTURES / "demo.cast").read_text().splitlines()[1:]]
    (PICTURES / "demo.svg").write_text(screen([(at, text.replace("\r\n", "\n")) for at, _, text in events]))
    print(f"pictures: {PICTURES}")


main()
