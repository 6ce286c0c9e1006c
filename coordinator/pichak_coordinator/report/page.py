"""The content laid out as one HTML page that opens offline: script, style and figures are in it."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from pichak_coordinator.report.charts import Chart
from pichak_coordinator.report.content import Content
from pichak_core import __version__

#: What tells a page of ours from another file.
GENERATOR = "pichak fleet report"
#: Up to so many sections are open from the start.
_OPEN_UP_TO = 4
_MOST_FINDINGS = 200


class MissingExtraError(RuntimeError):
    """jinja2 or plotly is not installed; the text says what to do."""


def page(content: Content) -> str:
    """The page. `MissingExtraError` where jinja2 or plotly is missing."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"a report needs {error.name or 'jinja2 and plotly'}; install the extra: "
            "pip install 'pichak-fleet[report]'"
        ) from error
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = _figures(content)
    # A page without a single figure carries no plotly.
    plotly = _in_script(str(get_plotlyjs())) if figures else ""
    script, style = _file("page.js"), _file("page.css")
    hashes = " ".join(_hash(text) for text in (plotly, script) if text)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.from_string(_file("page.html.j2")).render(
        page=content,
        generator=GENERATOR,
        version=__version__,
        policy=Markup(policy),  # noqa: S704 - made of constants and hashes
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        plotly=Markup(plotly),  # noqa: S704 - the library's own file
        figures=Markup(json_in_html(figures)),  # noqa: S704 - escaped by that function
        open_up_to=_OPEN_UP_TO,
        most_findings=_MOST_FINDINGS,
    )


def _figures(content: Content) -> dict[str, Any]:
    """Element id -> figure, by the ids that the template gives."""
    made: dict[str, Any] = {}
    charts: list[tuple[str, Chart]] = [("c-links", content.links)]
    for section in content.sections:
        charts += [(f"c-{section.anchor}-{n}", c) for n, c in enumerate(section.charts, 1)]
    for name, chart in charts:
        if chart.figure is not None:
            made[name] = chart.figure
    return made


def json_in_html(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it ends the element, opens a comment
    or is a line end to an old reader."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _in_script(text: str) -> str:
    """JavaScript that does not end the element it stands in."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    """What a Content-Security-Policy lets run: this text and no other."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _file(name: str) -> str:
    place = resources.files("pichak_coordinator.report") / "templates" / name
    return place.read_text(encoding="utf-8").replace("\r\n", "\n")
