"""What the doctor says: a finding per thing looked at, and the report of them all as text, JSON or HTML.

Left out: looking, which `software`, `machine` and `gpus` do.
"""

import html
import json
from dataclasses import asdict, dataclass

MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
# A bar beside the word, which keeps the page's own colour: 3 to 1 on white and on dark themes (WCAG 2.2, 1.4.11).
COLOURS = {"ok": "#2f9160", "note": "#b07a00", "problem": "#d64541"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    name: what was looked at, e.g. "cores". status: "ok"; "note", the labs run and something is worth knowing;
    "problem", labs will not run. value: what was found. meaning: what it costs the learner and what to do; ""
    where there is nothing to say.
    """

    name: str
    status: str
    value: str
    meaning: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, in the order of looking."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "problem")

    def text(self) -> str:
        """A table; what a finding means stands on a line below it."""
        wide = max((len(finding.name) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.name:{wide}}  {MARKS[finding.status]:7}  {finding.value}")
            if finding.meaning:
                lines.append(f"{'':{wide}}           {finding.meaning}")
        return "\n".join(lines)

    def json(self) -> str:
        """A list of objects with the keys name, status, value, meaning."""
        return json.dumps([asdict(finding) for finding in self.findings], indent=1, ensure_ascii=False)

    def _repr_html_(self) -> str:
        rows = "".join(_row(finding) for finding in self.findings)
        return f'<table aria-label="what this machine has">{rows}</table>'

    def __repr__(self) -> str:
        return self.text()


def _row(finding: Finding) -> str:
    cell = '<td style="text-align:left;vertical-align:top">'
    style = f"color:inherit;border-left:4px solid {COLOURS[finding.status]};padding-left:.4em"
    state = f'<b style="{style}">{MARKS[finding.status]}</b>'
    cells = [html.escape(finding.name), state, html.escape(finding.value), html.escape(finding.meaning)]
    return "<tr>" + "".join(f"{cell}{text}</td>" for text in cells) + "</tr>"
