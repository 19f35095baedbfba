"""Tables as text: one `Sheet` becomes Markdown or LaTeX (booktabs), whoever wrote what is in it.

Labels, questions and traces are text of users and models: control characters are spelled out, markup is escaped.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiexp.config import ConfigError
from hiexp.tracking import write_json

SUFFIXES = ("json", "md", "tex", "svg", "png")


@dataclass(frozen=True)
class Sheet:
    """Rows of text; a row that is a plain string is a heading over the rows after it."""

    title: str
    header: Sequence[tuple[str, str]]
    """(group, name) of each column"""
    lines: Sequence[Sequence[str] | str]
    names: int = 1
    """columns at the left that are words, not numbers"""


@dataclass(frozen=True)
class Block:
    """Text in its own lines, such as a trace: (label, text)."""

    title: str
    parts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Result:
    """What a command has to say: `data` for machines, the rest for readers."""

    name: str
    title: str
    data: Mapping[str, Any]
    body: Sequence[Sheet | Block]
    notes: Sequence[str] = ()
    footnotes: Mapping[str, str] = field(default_factory=dict)
    """mark -> text; a cell refers to one by ending in ^mark"""


def write_result(folder: str | Path, result: Result, draw: Callable[[Sequence[Path]], None]) -> str:
    """Write <name>.json, .md, .tex, and by `draw` .svg and .png; returns the Markdown."""
    place = Path(folder)
    files = {suffix: place / f"{result.name}.{suffix}" for suffix in SUFFIXES}
    text = to_markdown(result)
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_json(files["json"], encodable(result.data))
        files["md"].write_text(text, encoding="utf-8")
        files["tex"].write_text(to_latex(result), encoding="utf-8")
        draw([files["svg"], files["png"]])
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror}); choose another --out") from error
    return text


def to_markdown(result: Result) -> str:
    parts = [f"# {markdown(result.title)}\n"]
    for one in result.body:
        parts.append(f"## {markdown(one.title)}\n")
        parts.append(_markdown_table(one) if isinstance(one, Sheet) else _markdown_block(one))
    if result.footnotes:
        parts.append("".join(f"- ^{mark} {markdown(text)}\n" for mark, text in result.footnotes.items()))
    if result.notes:
        parts.append("## Notes\n")
        parts.append("".join(f"- {markdown(note)}\n" for note in result.notes))
    return "\n".join(parts)


def to_latex(result: Result) -> str:
    """Needs booktabs and graphicx; text is UTF-8."""
    parts = [f"% {_one_line(result.title)}\n% \\usepackage{{booktabs,graphicx}}\n"]
    parts += [_latex_table(one) if isinstance(one, Sheet) else _latex_block(one) for one in result.body]
    small = [f"\\textsuperscript{{{mark}}} {latex(text)}" for mark, text in result.footnotes.items()]
    small += [latex(note) for note in result.notes]
    if small:
        items = "".join(f"\\item {{}}{text}\n" for text in small)
        parts.append(f"{{\\footnotesize\n\\begin{{itemize}}\n{items}\\end{{itemize}}}}\n")
    return "\n".join(parts)


def printable(text: str) -> str:
    """Spells out what could steer a terminal or hide text: controls, bidirectional marks, half surrogates."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def encodable(value: Any) -> Any:
    """Nested values whose texts UTF-8 can hold: half surrogates are spelled out."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    return value


def markdown(text: str) -> str:
    """Text in a line or a cell: no markup, no end of the cell."""
    for character in "\\`|<":
        text = text.replace(character, "\\" + character)
    return _one_line(text).replace("](", "]\\(")


def latex(text: str) -> str:
    """Text in a line or a cell."""
    escaped = "".join(_LATEX.get(character, character) for character in _one_line(text))
    return "{}" + escaped if escaped[:1] in ("[", "*") else escaped  # else an argument of the \\ before it


def number(value: float | None, digits: int = 1, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:{'+' if sign else ''}.{digits}f}"


def interval(low: float, high: float, digits: int = 1) -> str:
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _markdown_table(sheet: Sheet) -> str:
    rows = [[f"{group} {name}".strip() for group, name in sheet.header]]
    rows.append(["---"] * sheet.names + ["---:"] * (len(sheet.header) - sheet.names))
    for line in sheet.lines:
        cells = [f"**{markdown(line)}**"] if isinstance(line, str) else [markdown(cell) for cell in line]
        rows.append(cells + [""] * (len(sheet.header) - len(cells)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _markdown_block(block: Block) -> str:
    parts = []
    for label, text in block.parts:
        shown = printable(text).rstrip("\n")
        fence = "`" * (1 + max([2, *(len(run) for run in re.findall("`+", shown))]))  # no text ends its own fence
        parts.append(f"**{markdown(label)}**\n\n{fence}text\n{shown}\n{fence}\n")
    return "\n".join(parts)


def _latex_table(sheet: Sheet) -> str:
    count = len(sheet.header)
    lines = [
        f"\\begin{{table*}}[t]\n\\centering\\small\n\\caption{{{latex(sheet.title)}}}",
        f"\\resizebox{{\\ifdim\\width>\\textwidth\\textwidth\\else\\width\\fi}}{{!}}{{%\n"
        f"\\begin{{tabular}}{{{'l' * sheet.names}{'r' * (count - sheet.names)}}}\n\\toprule",
    ]
    if any(group for group, _ in sheet.header):
        lines += _latex_groups(sheet)
    lines.append(" & ".join(latex(name) for _, name in sheet.header) + " \\\\\n\\midrule")
    for line in sheet.lines:
        if isinstance(line, str):
            lines.append(f"\\multicolumn{{{count}}}{{l}}{{\\textit{{{latex(line)}}}}} \\\\")
        else:
            cells = [_latex_cell(cell) for cell in line] + [""] * (count - len(line))
            lines.append(" & ".join(cells) + " \\\\")
    return "\n".join([*lines, "\\bottomrule\n\\end{tabular}}\n\\end{table*}\n"])


def _latex_groups(sheet: Sheet) -> list[str]:
    spans: list[tuple[str, int]] = []
    for group, _ in sheet.header:
        if spans and spans[-1][0] == group:
            spans[-1] = (group, spans[-1][1] + 1)
        else:
            spans.append((group, 1))
    cells = [
        f"\\multicolumn{{{size}}}{{c}}{{{latex(group)}}}" if group else " & " * (size - 1) for group, size in spans
    ]
    rules, start = [], 1
    for group, size in spans:
        if group:
            rules.append(f"\\cmidrule(lr){{{start}-{start + size - 1}}}")
        start += size
    return [" & ".join(cells) + " \\\\", "".join(rules)]


def _latex_cell(cell: str) -> str:
    """The interval small, the footnote mark raised."""
    mark = re.search(r"\^([a-z]+)$", cell)
    body = cell[: mark.start()] if mark else cell
    found = re.fullmatch(r"([-+]?[\d.]+) (\[[-\d., ]+\])(.*)", body)
    text = f"{found[1]}\\,{{\\tiny{found[2]}}}{latex(found[3])}" if found else latex(body)
    return text + (f"\\textsuperscript{{{mark[1]}}}" if mark else "")


def _latex_block(block: Block) -> str:
    parts = [f"\\subsection*{{{latex(block.title)}}}"]
    for label, text in block.parts:
        lines = "\\newline\n".join(latex(line) or "~" for line in printable(text).rstrip("\n").split("\n"))
        parts.append(f"\\paragraph{{{latex(label)}}} {{\\ttfamily\\footnotesize\\raggedright {lines}\\par}}")
    return "\n".join(parts) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}",
}  # fmt: skip
