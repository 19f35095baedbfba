"""The shape of the house: which module may import which, how long a function may be, and that every YAML loads."""

import ast
from pathlib import Path

import pytest

from hiexp.assemble import Config
from hiexp.config import load

ROOT = Path(__file__).resolve().parents[1]
MODULES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "hiexp").glob("*.py")}

AGENT = """
protocols tag_protocol peer_form peer_protocols prompt_files encoding encoder search search_types raw_text corpora
passages rankers vectors indexes recall experience effects acceptance hits hek languages rewards engine vllm_engine
vllm_weights rollout sampling kv_cache background baselines pipelines askers judge
"""
OPTIMISATION = """
advantages loss fused attention lora batching model fsdp trainer step_metrics shards checkpoint
"""
LAYERS = dict(
    enumerate(
        set(line.split())
        for line in """
redact config trajectory distributed advantages
protocols tag_protocol peer_form peer_protocols prompt_files \
metrics data encoder tracking resume run_log watch paired loss fused attention lora speed sampling kv_cache \
background charts reply_parser journal chat_replies api_client lab_world lab_languages components raw_text corpora \
passages search_types notation math_check math_worker significance \
observations dialects search_remote_config http_calls micro_batches http_serving layouts sample_fields records
engine encoding askers benchmarks vllm_engine vllm_weights search search_cache search_clients search_tavily \
rankers vectors indexes experience acceptance hits hek rewards batching model clustering languages \
hek_prompts hek_filters recall effects dosage success agent_logs attempts
rollout baselines pipelines methods judge eval_config step_metrics trainer fsdp shards checkpoint hek_report \
reflector run_panel demonstrations
hek_build hek_update evaluation report report_views convert lab_teacher hek_page
browse hek_view assemble hek_stages lab_policy arms paper_rows sheets pictures table_build tables case_study figures \
costs leaderboard
lab_demo sft refresh uplift eval_run search_cli corpus_build search_server study study_arms study_plan study_stores \
study_stats study_figure study_report
lab study_job
""".strip().splitlines()
    )
)
"""A line per layer, from the bottom up. Imports go down, or sideways within a layer without a circle."""
AGENT_SIDE = set(AGENT.split())
OPTIMISATION_SIDE = set(OPTIMISATION.split())
"""The two sides pass trajectories and named tensors, and never import each other."""


def imports(tree: ast.Module) -> set[str]:
    """The modules of hiexp that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hiexp."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hiexp.")}
    return names


def packages(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    return names


def test_every_module_has_a_layer_and_imports_only_downward():
    layer = {name: number for number, names in LAYERS.items() for name in names}
    assert set(MODULES) - {"__init__"} == set(layer)
    for name, tree in MODULES.items():
        for other in imports(tree):
            assert layer[other] <= layer[name], f"{name} (layer {layer[name]}) imports {other} (layer {layer[other]})"


def test_imports_have_no_circle():
    open_, done = [], set()

    def visit(name: str) -> None:
        assert name not in open_, f"circle: {' -> '.join([*open_, name])}"
        if name not in done:
            open_.append(name)
            for other in imports(MODULES[name]):
                visit(other)
            open_.pop()
            done.add(name)

    for name in MODULES:
        visit(name)


def test_agent_and_optimisation_sides_never_import_each_other():
    for side, other in ((AGENT_SIDE, OPTIMISATION_SIDE), (OPTIMISATION_SIDE, AGENT_SIDE)):
        for name in side:
            assert not imports(MODULES[name]) & other, name


def test_text_modules_need_no_torch():
    text_modules = "config trajectory protocols metrics data records reply_parser hek_filters hek_prompts lab_world"
    protocols = "tag_protocol peer_form peer_protocols prompt_files"
    scoring = "layouts sample_fields benchmarks notation math_check math_worker significance"
    for name in (*text_modules.split(), *protocols.split(), *scoring.split()):
        assert "torch" not in packages(MODULES[name]), name


def test_loss_is_one_page_that_needs_no_other_file():
    assert imports(MODULES["loss"]) <= {"config", "advantages"}
    assert len((ROOT / "hiexp/loss.py").read_text().splitlines()) <= 195


@pytest.mark.parametrize("path", [*(ROOT / "hiexp").glob("*.py"), *ROOT.glob("*.py")], ids=lambda path: path.name)
def test_functions_and_files_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400, path
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            limit = 80 if node.name == "main" else 60  # a main is read from top to bottom
            assert node.end_lineno - node.lineno < limit, f"{path.name}: {node.name}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_yaml_loads(path):
    assert load(Config, [str(path)]).out


def test_the_readme_names_only_what_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = [line for block in text.split("```")[1::2] for line in block.splitlines()]
    for line in code:
        for word in line.split():
            if word.endswith((".py", ".yaml")) and "/" not in word.removeprefix("configs/").removeprefix("hiexp/"):
                assert any((ROOT / place / word).exists() for place in ("", "hiexp", "configs")), word
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    for line in code:
        if line.startswith("make "):
            assert line.split()[1] in targets, line
