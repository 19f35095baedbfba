"""Text of models and users in Markdown, LaTeX, pictures. They must fail if a label ends its cell or runs as markup."""

import json
import re

import numpy as np
import pytest
from evaluation_runs import arm, scored, write_run

from hiexp.sheets import Result, Sheet, latex, markdown, printable, to_latex, to_markdown
from hiexp.tables import main

QA = ("hotpotqa", "2wiki", "musique", "bamboogle")


@pytest.fixture
def run(tmp_path):
    rng = np.random.default_rng(0)
    both = [
        arm("ReSearch" + " + HiExp" * hek, name, scored(rng, 9), hek, "research")
        for name in QA
        for hek in (False, True)
    ]
    return write_run(tmp_path / "run", *both)


HOSTILE = (
    'a|b <script>alert(1)</script> $x_1$ & 50% \\end{tabular} # ~ ^ {"}\n| c |\x1b[31m\u202e\x00`[x](javascript:1)'
)


def test_hostile_labels_stay_text_in_every_format(tmp_path, capsys):
    label = HOSTILE + "\ud800"
    folder = write_run(tmp_path / "r", *(arm("A", n, scored(np.random.default_rng(0), 4)) for n in QA))
    record = json.loads((folder / "evaluation.json").read_text())
    for about in record["arms"].values():
        about["label"] = about["model"] = label
    (folder / "evaluation.json").write_text(json.dumps(record))
    assert main(["table1", str(folder), "--out", str(tmp_path / "out"), "--paper"]) == 0
    text = (tmp_path / "out" / "table1.md").read_text()
    assert "\x1b" not in text and "\u202e" not in text and "\\x1b" in text and "<script" not in text.replace("\\<", "")
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 2, "a row of a table has more cells than another"
    tex = (tmp_path / "out" / "table1.tex").read_text()
    assert "\\textbackslash{}end\\{tabular\\}" in tex and tex.count("\\begin{tabular}") == tex.count("\\end{tabular}")
    assert (tmp_path / "out" / "table1.svg").read_text().count("<script") == 0
    assert (tmp_path / "out" / "table1.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


def test_latex_is_well_formed(run, tmp_path, capsys):
    for name in ("table1", "table5"):
        main([name, str(run), "--paper", "--out", str(tmp_path)])
        check_latex((tmp_path / f"{name}.tex").read_text())
    capsys.readouterr()


def check_latex(text):
    """Braces and environments balance, and every row of a tabular has its number of cells."""
    bare = re.sub(r"\\[{}\\%]", "", text)
    assert bare.count("{") == bare.count("}")
    for name in re.findall(r"\\begin\{(\w+\*?)\}", text):
        assert text.count(f"\\begin{{{name}}}") == text.count(f"\\end{{{name}}}")
    for columns, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", text, re.S):
        lines = [line for line in body.split("\\\\\n") if "&" in line or "multicolumn" in line]
        for line in lines:
            spans = sum(int(size) - 1 for size in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert len(re.split(r"(?<!\\)&", line)) + spans == len(columns), line


def test_escapes():
    assert latex("50% & [x]") == r"50\% \& [x]" and latex("[x]") == "{}[x]"
    assert markdown("a|b\nc") == "a\\|b c" and printable("a\tb\x07") == "a\tb\\x07"
    sheet = Sheet("t", [("", "name"), ("g", "x")], ["head", ["a", "1.0 [0.5, 1.5]^b"]])
    result = Result("n", "t", {}, [sheet], [], {"b": "why"})
    assert "1.0\\,{\\tiny[0.5, 1.5]}\\textsuperscript{b}" in to_latex(result)
    assert "| **head** |  |" in to_markdown(result)
    check_latex(to_latex(result))
