"""A report as one HTML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Final

from psqlmessages.exceptions import MessagesError
from psqlmessages.pipeline.report.contents import (
    LISTED,
    ExchangeFlow,
    Report,
    ReportFigures,
    TrafficAmount,
)

_PLOTLY: Final = "plotly/package_data/plotly.min.js"
# Ordered by dependency.
_MODULES: Final = (
    *("dom", "format", "panels", "windows", "graph_layout", "graph_draw"),
    "../report/report",
)
_STYLES: Final = ("monitor/monitor", "monitor/traffic", "monitor/graph", "report/report")
_IMPORT: Final = re.compile(r'^import (\{[^}]*\}) from "\./([\w./]+)\.js";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (const|function|class) (\w+)", re.MULTILINE)
_OUTCOMES: Final = {
    "ok": "Routed",
    "no_route": "No route",
    "too_many_hops": "Too many hops",
    "failed": "Failed",
}


class PlotlyMissing(MessagesError):
    """The charts need plotly, which is not installed."""


def page(report: Report) -> str:
    """Write the page; raises PlotlyMissing."""
    figures = report.figures
    return Template(_asset("report/page.html")).substitute(
        style="\n".join(_asset(f"{name}.css") for name in _STYLES),
        database=escape(report.database),
        begin=_written(report.period.begin),
        end=_written(report.period.end),
        made_at=_written(report.made_at),
        source=escape(figures.source),
        step=_duration(figures.step),
        empty="" if figures.total is None else "hidden",
        filled="hidden" if figures.total is None else "",
        has_latency="" if figures.total and figures.total.latency else "hidden",
        no_latency="hidden" if figures.total and figures.total.latency else "",
        has_flows="" if report.flows else "hidden",
        no_flows="hidden" if report.flows else "",
        totals=_totals(figures, report.period.seconds),
        topics=_busiest("Topic", figures.topics, figures),
        senders=_busiest("Sender", figures.senders, figures),
        exchanges=_exchanges(report.flows),
        copies=_copies(report.flows, report.home),
        data=json.dumps(report.as_json(), ensure_ascii=False).replace("<", r"\u003c"),
        plotly=_within(_plotly()),
        # One script of all modules: a page opened from disk may not import others.
        script=_within("\n".join(map(_wrapped, _MODULES))),
    )


# Tables


def _totals(figures: ReportFigures, seconds: float) -> str:
    total = figures.total
    if total is None:
        return ""
    most = max(amount.count for amount in figures.steps.values()) / figures.step
    entries = [
        ("Messages", f"{total.count:,}", _size(total.bytes)),
        ("Mean", f"{_rate(total.count / seconds)} msg/s", f"{_size(total.bytes / seconds)}/s"),
        ("Most", f"{_rate(most)} msg/s", f"in {_duration(figures.step)}"),
        ("Topics", f"{len(figures.topics):,}", f"{len(figures.senders):,} senders"),
        ("Size p95", _size(total.size[1]), f"half at most {_size(total.size[0])}"),
    ]
    if total.latency:
        half = f"half within {_milliseconds(total.latency[0])}"
        entries.append(("Latency p95", _milliseconds(total.latency[1]), half))
    return "".join(
        f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="note">{note}</dd></div>'
        for name, value, note in entries
    )


def _busiest(kind: str, amounts: Mapping[str, TrafficAmount], figures: ReportFigures) -> str:
    """Write a table of the busiest with bars, and the number of those left out."""
    total = figures.total.count if figures.total else 1
    heads = [kind, "Messages", "Share", "Bytes", "Size p50", "Size p95", "Size p99"]
    if figures.total and figures.total.latency:
        heads += ["Latency p50", "Latency p95", "Latency p99"]
    rows = []
    for name, amount in list(amounts.items())[:LISTED]:
        share = 100 * amount.count / total
        bar = f'<span class="share"><i style="width: {share:.2f}%"></i></span>'
        rows.append(
            [
                escape(name),
                f"{amount.count:,}",
                f"{bar}{share:.1f} %",
                *map(_size, (amount.bytes, *amount.size)),
                *map(_milliseconds, amount.latency or ()),
            ]
        )
    more = len(amounts) - LISTED
    note = f'<p class="note pad">And {more:,} more.</p>' if more > 0 else ""
    return _table(heads, rows) + note


def _exchanges(flows: Iterable[ExchangeFlow]) -> str:
    rows = [
        [escape(flow.name), *(f"{flow.counts.get(outcome, 0):,}" for outcome in _OUTCOMES)]
        for flow in flows
    ]
    return _table(["Exchange", *_OUTCOMES.values()], rows)


def _copies(flows: Iterable[ExchangeFlow], home: str) -> str:
    rows = []
    for flow in flows:
        for each in flow.destinations:
            source, to = _place(flow.source, home), _place(each["to"], home)
            texts = (flow.name, source, to, each["selector"] or "always")
            rows.append([*map(escape, texts), f"{each['copies']:,}"])
    return _table(["Exchange", "From", "To", "When", "Copies"], rows, texts=4)


def _place(place: tuple[str, str], home: str) -> str:
    namespace, queue = place
    return queue if namespace == home else f"{namespace}/{queue}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Write a table of HTML cells; the columns after the first ``texts`` have numbers."""
    kinds = [""] * texts + [' class="number"'] * (len(heads) - texts)
    columns = zip(heads, kinds, strict=True)
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in columns)
    body = ""
    for first, *cells in rows:
        rest = zip(cells, kinds[1:], strict=False)
        others = "".join(f"<td{kind}>{cell}</td>" for cell, kind in rest)
        body += f'<tr><th scope="row">{first}</th>{others}</tr>'
    return f'<table class="list"><thead>{head}</thead><tbody>{body}</tbody></table>'


# Formatting


def _written(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S")


def _size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate == 0 or rate >= 100 else f"{rate:,.2g}"


def _milliseconds(milliseconds: float) -> str:
    if milliseconds < 1000:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds / 1000:,.1f} s"


def _duration(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds % length == 0:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


# Files


def _asset(name: str) -> str:
    folder = resources.files("psqlmessages").joinpath("static/psqlmessages")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        path = Path(str(metadata.distribution("plotly").locate_file(_PLOTLY)))
        return path.read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, FileNotFoundError):
        raise PlotlyMissing("a report needs plotly: pip install 'psqlmessages[web]'") from None


def _wrapped(name: str) -> str:
    source = _asset(f"monitor/{name}.js").replace("../monitor/", "./")
    names = ", ".join(found[2] for found in _EXPORT.finditer(source))
    source = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r'const \1 = modules["\2"];', source))
    return f'modules["{name}"] = (() => {{\n{source}\nreturn {{ {names} }};\n}})();'


def _within(script: str) -> str:
    """Escape a script so that the HTML parser does not find an end tag in it."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
