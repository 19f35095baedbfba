"""python -m hiexp.search COMMAND key=value ...: make a corpus, an index, measure it, serve it.

    corpus    one file of passages: supporting passages of question files, and a sample of a Wikipedia dump
    index     a folder that search.index names: passages, words (BM25), vectors (faiss)
    recall    the share of supporting passages that a search finds
    serve     a search over HTTP

`python -m hiexp.search COMMAND --help` lists the keys of a command. Each takes YAML files too.
"""

import importlib
import sys
from collections.abc import Sequence

from hiexp.config import ConfigError, lookup, run_script
from hiexp.encoder import load_encoder
from hiexp.indexes import build_index
from hiexp.search_types import PARTS, IndexConfig

COMMANDS = {
    "corpus": ("hiexp.corpus_build", "main"),
    "index": ("hiexp.search_cli", "index"),
    "recall": ("hiexp.recall", "main"),
    "serve": ("hiexp.search_server", "main"),
}
"""command -> module and function(argv) -> exit code; a module is loaded when it is asked for"""
INDEX_HELP = """Make a folder that `search.index` names.

    python -m hiexp.search index out=runs/wiki corpus=[data/corpus.jsonl] backend=hybrid \\
        encoder.path=models/multilingual-e5-base encoder.prefix=e5
    python -m hiexp.search index out=runs/wiki_ivf corpus=[data/corpus.jsonl] kind=ivf vectors_from=runs/wiki

Interrupted, the same command goes on where it was."""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        module, function = lookup(COMMANDS, argv[0], "command")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return getattr(importlib.import_module(module), function)(argv[1:])


def index(argv: Sequence[str]) -> int:
    return run_script(_index, IndexConfig, argv, INDEX_HELP)


def _index(cfg: IndexConfig) -> None:
    needs_encoder = "dense" in PARTS[cfg.backend] and not cfg.vectors_from
    manifest = build_index(cfg, load_encoder(cfg.encoder) if needs_encoder else None)
    counts = ", ".join(f"{manifest[name]} {name}" for name in ("passages", "repeated", "cut"))
    print(f"{cfg.out}: {counts}; corpus {manifest['corpus'][:16]}")
    if dense := manifest.get("dense"):
        facts = ", ".join(f"{name} {dense[name]}" for name in ("kind", "storage", "dimension", "prefix", "pooling"))
        if "taken_from" in dense and dense["taken_from"] != dense["storage"]:
            facts += f" (made of {dense['taken_from']})"
        print(f"vectors: {facts}; mean cosine of two passages {dense['mean_cosine']}")
