"""A traffic report as one HTML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from string import Template
from typing import Final

from psqlmessages.pipeline.report.contents import (
    TABLE_ROWS,
    ExchangeFlow,
    Report,
    ReportStatistics,
    TrafficStatistics,
)

# JavaScript modules, relative to monitor/, in the order of their dependencies.
_MODULES: Final = (
    "i18n", "dom", "format", "panels", "windows", "graph_layout", "graph_draw", "../report/report",
)  # fmt: skip
_STYLES: Final = ("monitor/monitor", "monitor/traffic", "monitor/graph", "report/report")
_IMPORT: Final = re.compile(r'^import (\{[^}]*\}) from "\./([\w./]+)\.js";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (const|function|class) (\w+)", re.MULTILINE)
# The HTML parser would act on these tags in a script.
_TAG: Final = re.compile(r"<(?=/script|!--)", re.IGNORECASE)
_OUTCOMES: Final = {
    "ok": "Routed",
    "no_route": "No route",
    "discarded": "Discarded",
    "too_many_hops": "Too many hops",
    "failed": "Failed",
}


def render_page(report: Report) -> str:
    """Return the report as an HTML page that needs no other file."""
    statistics = report.statistics
    has_latency = statistics.total and statistics.total.latency
    return Template(_read_asset("report/page.html")).substitute(
        style="\n".join(_read_asset(f"{name}.css") for name in _STYLES),
        database=escape(report.database),
        begin=_format_time(report.period.begin),
        end=_format_time(report.period.end),
        made_at=_format_time(report.made_at),
        source=escape(statistics.source),
        step=_format_duration(statistics.step),
        empty="" if statistics.total is None else "hidden",
        filled="hidden" if statistics.total is None else "",
        has_latency="" if has_latency else "hidden",
        no_latency="hidden" if has_latency else "",
        has_flows="" if report.flows else "hidden",
        no_flows="hidden" if report.flows else "",
        totals=_render_totals(statistics, report.period.seconds),
        topics=_render_busiest("Topic", statistics.topics, statistics),
        senders=_render_busiest("Sender", statistics.senders, statistics),
        exchanges=_render_exchanges(report.flows),
        copies=_render_copies(report.flows),
        data=json.dumps(report.as_json(), ensure_ascii=False).replace("<", r"\u003c"),
        # All modules in one script: a page that is opened from disk cannot import files.
        script=_TAG.sub(r"\\x3c", "\n".join(map(_wrap_module, _MODULES))),
    )


def _render_totals(statistics: ReportStatistics, seconds: float) -> str:
    total = statistics.total
    if total is None:
        return ""
    peak = max(step.count for step in statistics.steps.values()) / statistics.step
    size_p50, size_p95, _ = total.size
    entries = [
        ("Messages", f"{total.count:,}", _format_size(total.bytes)),
        ("Mean", _format_rate(total.count / seconds), f"{_format_size(total.bytes / seconds)}/s"),
        ("Peak", _format_rate(peak), f"in {_format_duration(statistics.step)}"),
        ("Topics", f"{len(statistics.topics):,}", f"{len(statistics.senders):,} senders"),
        ("Size p95", _format_size(size_p95), f"half at most {_format_size(size_p50)}"),
    ]
    if total.latency:
        latency_p50, latency_p95, _ = map(_format_milliseconds, total.latency)
        entries.append(("Latency p95", latency_p95, f"half within {latency_p50}"))
    return "".join(
        f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="note">{note}</dd></div>'
        for name, value, note in entries
    )


def _render_busiest(
    kind: str, entries: Mapping[str, TrafficStatistics], statistics: ReportStatistics
) -> str:
    """Render a table of the first TABLE_ROWS entries, and the number of further entries."""
    total = statistics.total.count if statistics.total else 1
    heads = [kind, "Messages", "Share", "Bytes", "Size p50", "Size p95", "Size p99"]
    if statistics.total and statistics.total.latency:
        heads += ["Latency p50", "Latency p95", "Latency p99"]
    rows = []
    for name, entry in list(entries.items())[:TABLE_ROWS]:
        share = 100 * entry.count / total
        bar = f'<span class="share"><i style="width: {share:.2f}%"></i></span>'
        row = [escape(name), f"{entry.count:,}", f"{bar}{share:.1f} %"]
        row += map(_format_size, (entry.bytes, *entry.size))
        row += map(_format_milliseconds, entry.latency or ())
        rows.append(row)
    more = len(entries) - TABLE_ROWS
    note = f'<p class="note pad">And {more:,} more.</p>' if more > 0 else ""
    return _render_table(heads, rows) + note


def _render_exchanges(flows: Iterable[ExchangeFlow]) -> str:
    rows = [
        [escape(flow.name), *(f"{flow.counts.get(outcome, 0):,}" for outcome in _OUTCOMES)]
        for flow in flows
    ]
    return _render_table(["Exchange", *_OUTCOMES.values()], rows)


def _render_copies(flows: Iterable[ExchangeFlow]) -> str:
    rows = []
    for flow in flows:
        for each in flow.destinations:
            queues = [_format_queue(queue) for queue in (flow.source, each["to"])]
            texts = (flow.name, *queues, each["selector"] or "always")
            rows.append([*map(escape, texts), f"{each['copies']:,}"])
    return _render_table(["Exchange", "From", "To", "When", "Copies"], rows, text_count=4)


def _format_queue(queue: tuple[str, str]) -> str:
    namespace, name = queue
    return name if namespace == "default" else f"{namespace}/{name}"


def _render_table(heads: Sequence[str], rows: Iterable[Sequence[str]], text_count: int = 1) -> str:
    """Render a table of HTML cells; the columns after the first ``text_count`` have numbers."""
    classes = [""] * text_count + [' class="number"'] * (len(heads) - text_count)
    columns = zip(heads, classes, strict=True)
    head = "".join(f'<th scope="col"{class_}>{name}</th>' for name, class_ in columns)
    body = ""
    for row_head, *cells in rows:
        pairs = zip(cells, classes[1:], strict=False)
        row = "".join(f"<td{class_}>{cell}</td>" for cell, class_ in pairs)
        body += f'<tr><th scope="row">{row_head}</th>{row}</tr>'
    return f'<table class="list"><thead>{head}</thead><tbody>{body}</tbody></table>'


def _format_time(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S")


def _format_size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f} msg/s" if rate == 0 or rate >= 100 else f"{rate:,.2g} msg/s"


def _format_milliseconds(milliseconds: float) -> str:
    if milliseconds < 1000:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds / 1000:,.1f} s"


def _format_duration(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds % length == 0:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _read_asset(name: str) -> str:
    folder = resources.files("psqlmessages").joinpath("static/psqlmessages")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _wrap_module(name: str) -> str:
    """Return a script that stores a module's exports in `modules`, and imports from `modules`."""
    source = _read_asset(f"monitor/{name}.js").replace("../monitor/", "./")
    names = ", ".join(match[2] for match in _EXPORT.finditer(source))
    source = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r'const \1 = modules["\2"];', source))
    return f'modules["{name}"] = (() => {{\n{source}\nreturn {{ {names} }};\n}})();'
