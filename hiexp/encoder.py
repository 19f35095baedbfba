"""Text to unit vectors, for experience keys and for passages.

A zero row stands for a text that the encoder knows nothing of (blank, or only unknown words); its similarity
to everything is 0. The fingerprint names all that changes a vector; who stores vectors stores it.
A new encoder is a class with `fingerprint`, `dim` and `encode`, and a line in ENCODERS.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import yaml
from sklearn.feature_extraction.text import HashingVectorizer, TfidfVectorizer

from hiexp.config import ConfigError, lookup
from hiexp.raw_text import mended

Kind = Literal["query", "passage"]
WORD = r"(?u)\b\w+\b"  # scikit-learn's default pattern drops words of one character
UNSPACED = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""letters of scripts that put no space between words, for a class of a pattern"""
PIECE = rf"(?u)[{UNSPACED}]|(?:(?![{UNSPACED}])\w)+"
"""a word, or a letter where no space tells words apart; the same as WORD in text without such letters"""
PREFIXES: dict[str, dict[str, str]] = {
    "none": {"query": "", "passage": ""},
    "e5": {"query": "query: ", "passage": "passage: "},
    "e5_instruct": {
        "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
        "passage": "",
    },
}
OWN = "model"
"""the prefixes that the model's own config_sentence_transformers.json names"""
E5_PREFIXES = re.compile(r"[\"'`]query: .*[\"'`]passage: ", re.DOTALL)
E5_NAME = re.compile(r"(?<![a-z0-9])m?e5(?:[-_]?(?:small|base|large|mistral|v\d+))*(?![a-z0-9])", re.IGNORECASE)
FRONT_MATTER = re.compile(r"\A\ufeff?---\s*\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class EncoderConfig:
    """Which encoder, and how it is called."""

    kind: str = "sentence"
    """sentence (a sentence-transformers folder), tfidf (a fitted vocabulary) or hash (needs nothing, poor)"""
    path: str = ""
    """local folder of the sentence encoder, or JSON file of the tfidf one"""
    prefix: str = "none"
    """none, e5 ("query: ", "passage: "), e5_instruct, or model (what its files name); the model's files must agree"""

    def __post_init__(self) -> None:
        lookup(ENCODERS, self.kind, "encoder.kind")
        lookup({**PREFIXES, OWN: {}}, self.prefix, "encoder.prefix")
        if self.kind != "sentence" and self.prefix != "none":
            raise ConfigError(f"encoder.prefix={self.prefix} is for kind=sentence; set it to none for {self.kind}")


class NotFinite(ValueError):
    """An encoder gave a vector with inf or nan."""

    def __init__(self, row: int) -> None:
        super().__init__(f"the encoder gave a non-finite vector for text {row}")
        self.row = row


class Encoder(Protocol):
    """What the HEK and the dense index ask of an encoder."""

    fingerprint: str
    dim: int

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        """[N, D] float32, each row of length 1 or all zero."""
        ...


class TfidfEncoder:
    """TF-IDF over words and word pairs of the texts it was fitted on; symmetric.

    Words never seen in fitting vanish, so a question about new entities is compared by its wording alone. In scripts
    without spaces between words each letter is one.
    """

    def __init__(self, vocabulary: Sequence[str], idf: Sequence[float]) -> None:
        if len(vocabulary) != len(idf) or not vocabulary:
            raise ValueError(f"{len(vocabulary)} terms and {len(idf)} idf values; need as many, at least one")
        self.vocabulary, self.idf = list(vocabulary), [float(value) for value in idf]
        index = {term: i for i, term in enumerate(vocabulary)}
        self._vectorizer = TfidfVectorizer(vocabulary=index, ngram_range=(1, 2), token_pattern=PIECE)
        self._vectorizer.idf_ = np.asarray(self.idf)
        self.dim = len(vocabulary)
        # earlier versions took a run of such letters for one word: their vectors are others
        pattern = [PIECE] if re.search(f"[{UNSPACED}]", " ".join(self.vocabulary)) else []
        self.fingerprint = f"tfidf:none:{_digest(json.dumps([self.vocabulary, self.idf, *pattern]).encode())}"

    @classmethod
    def fit(cls, texts: Sequence[str]) -> "TfidfEncoder":
        """Vocabulary and idf of `texts`."""
        vectorizer = TfidfVectorizer(ngram_range=(1, 2), token_pattern=PIECE)
        vectorizer.fit(texts)
        return cls([str(term) for term in vectorizer.get_feature_names_out()], vectorizer.idf_.tolist())

    @classmethod
    def load(cls, path: str | Path) -> "TfidfEncoder":
        """Read what `save` wrote; ConfigError when it is missing or something else."""
        file = Path(path)
        if not file.is_file():
            raise ConfigError(f"no tfidf encoder at {str(path)!r} (encoder.path); fit one and save it there")
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            return cls(record["vocabulary"], record["idf"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a saved tfidf encoder: {error}; write it again") from error

    def save(self, path: str | Path) -> None:
        """Write vocabulary and idf as JSON (no pickle), whole or not at all."""
        file, new = Path(path), Path(f"{path}.tmp")
        try:
            new.write_text(json.dumps({"vocabulary": self.vocabulary, "idf": self.idf}), encoding="utf-8")
            new.replace(file)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        return _dense(self._vectorizer, texts)


class HashEncoder:
    """Hashed words and word pairs: no data, no understanding. For tests and first steps; symmetric."""

    def __init__(self, dim: int = 1024) -> None:
        self.dim, self.fingerprint = dim, f"hash:none:{dim}"
        self._vectorizer = HashingVectorizer(n_features=dim, ngram_range=(1, 2), token_pattern=WORD)

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        return _dense(self._vectorizer, texts)


class SentenceEncoder:
    """A sentence-transformers model in a local folder; nothing is fetched."""

    def __init__(self, path: str | Path, prefix: str = "none") -> None:
        folder = Path(path)
        if not str(path) or not (folder / "config.json").is_file():
            raise ConfigError(
                f"encoder.path={str(path)!r} is not a sentence-transformers folder (no config.json in it)"
            )
        self.prefix, self._prefix = prefix, _prefixes(folder, prefix)
        self._model = _sentence_transformer(folder)
        pooling = (getattr(module, "pooling_mode", None) for module in self._model)
        self.pooling = next((str(mode) for mode in pooling if mode), "none")
        if prefix == "e5" and self.pooling != "mean":
            raise ConfigError(
                f"encoder.prefix=e5, but the model in {folder} pools by {self.pooling}; e5 models are averaged over "
                "tokens: correct 1_Pooling/config.json there, or set the prefix of the model that it is"
            )
        self.dim = int(self._model.encode(["x"], prompt="", show_progress_bar=False).shape[1])
        self.fingerprint = f"sentence:{prefix}:{folder_digest(folder)}"

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        rows = np.zeros((len(texts), self.dim), np.float32)
        texts = [mended(text) for text in texts]
        told = [i for i, text in enumerate(texts) if text.strip()]
        if told:
            # prompt="": a prompt named in the model's own files would come on top of our prefix
            inputs = [add_prefix(texts[i], self._prefix[kind]) for i in told]
            rows[told] = self._model.encode(inputs, prompt="", batch_size=64, show_progress_bar=len(told) > 2000)
        return unit_rows(rows)


def load_encoder(cfg: EncoderConfig) -> Encoder:
    """The encoder that the settings name; ConfigError when its files or package are missing."""
    return lookup(ENCODERS, cfg.kind, "encoder.kind")(cfg)


def describe_encoder(encoder: Encoder) -> dict[str, str]:
    """What a store of vectors says of their encoder: its fingerprint, and prefixes and pooling by name."""
    names = {name: str(getattr(encoder, name, "none")) for name in ("prefix", "pooling")}
    return {"encoder": encoder.fingerprint} | names


def add_prefix(text: str, prefix: str) -> str:
    """`text` with `prefix` in front exactly once."""
    return text if text.startswith(prefix) else prefix + text


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1 as float32; zero rows stay zero, a non-finite value raises NotFinite."""
    if not np.isfinite(rows).all():
        raise NotFinite(int(np.argwhere(~np.isfinite(rows))[0][0]))
    wide = np.asarray(rows, np.float64)  # a tiny norm would lose its digits in float32
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return (wide / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[N, M] similarities of unit or zero rows, clipped to [-1, 1]; ValueError for another length."""
    for rows in (a, b):
        require_unit(rows)
    product = a @ b.T
    return np.clip(product, -1.0, 1.0, out=product)


def require_unit(rows: np.ndarray) -> None:
    """ValueError for a row that is neither of length 1 nor zero."""
    lengths = np.linalg.norm(rows, axis=1)
    if not np.all((np.abs(lengths - 1) < 1e-3) | (lengths == 0)):
        raise ValueError("similarity needs unit rows: an inner product of other lengths is no cosine")


def _dense(vectorizer: Any, texts: Sequence[str]) -> np.ndarray:
    return unit_rows(vectorizer.transform(map(mended, texts)).toarray())


def _sentence_transformer(folder: Path) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as hf_logging
    except ImportError as error:
        raise ConfigError("encoder.kind=sentence needs sentence-transformers; install it, or use kind=tfidf") from error
    hf_logging.disable_progress_bar()
    try:
        return SentenceTransformer(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        first = " ".join(str(error).split())[:200]
        raise ConfigError(f"encoder.path={folder} cannot be loaded by sentence-transformers: {first}") from error


def _prefixes(folder: Path, prefix: str) -> dict[str, str]:
    """The text in front of queries and passages; ConfigError where the model's own files say that it is another."""
    own = _own_prefixes(folder)
    if prefix == OWN:
        if not any(own.values()):
            raise ConfigError(f"encoder.prefix=model, but {folder}/config_sentence_transformers.json names no prompts")
        return own
    chosen, names = lookup(PREFIXES, prefix, "encoder.prefix"), _names(folder)
    if any(E5_NAME.search(name) for name in names):
        needed = "e5_instruct" if any("instruct" in name.lower() for name in names) else "e5"
        if prefix != needed:
            raise ConfigError(f"encoder.path={folder} is an e5 model by its own files; set encoder.prefix={needed}")
    elif prefix in ("e5", "e5_instruct"):
        said = f"they name {', '.join(names[:3])}" if names else "they name no model"
        warnings.warn(
            f"encoder.prefix={prefix}, but nothing in {folder} says that it is an e5 model ({said}); if it is none, "
            "set encoder.prefix=none: with a prefix that it was not trained with it finds less",
            stacklevel=4,
        )
    elif E5_PREFIXES.search(_card(folder)) and not any(own.values()):
        warnings.warn(
            f'{folder}/README.md speaks of "query: " and "passage: "; if it asks for them, set encoder.prefix=e5',
            stacklevel=4,
        )
    if any(own.values()) and own != chosen:
        raise ConfigError(f"encoder.prefix={prefix} is not what {folder} was trained with ({own}); set it to model")
    return chosen


def _own_prefixes(folder: Path) -> dict[str, str]:
    """What the model's files put in front; empty texts where they say nothing."""
    prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
    passage = prompts.get("passage") or prompts.get("document") or ""
    return {"query": prompts.get("query") or "", "passage": passage}


def _names(folder: Path) -> list[str]:
    """What the model and those it was made of are called by its configuration and the head of its model card.

    The folder's name tells nothing: it is whoever copied the model who chose it. Nor do the card's sentences: they may
    speak of other models.
    """
    names = [_json(folder / "config.json").get("_name_or_path")]
    head = FRONT_MATTER.match(_card(folder))
    try:
        facts = yaml.safe_load(head[1]) if head else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        facts = {}
    facts = facts if isinstance(facts, dict) else {}
    base, index = facts.get("base_model"), facts.get("model-index")
    names += base if isinstance(base, list) else [base]
    names += [entry.get("name") for entry in index if isinstance(entry, dict)] if isinstance(index, list) else []
    names.append(facts.get("model_name"))
    return [name for name in names if isinstance(name, str) and name]


def _card(folder: Path) -> str:
    card = folder / "README.md"
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""


def _json(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def folder_digest(folder: Path, edge: int = 1 << 20) -> str:
    """Hash of names and contents; of a large file its size and both ends (weights have gigabytes)."""
    parts = []
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".json", ".txt", ".model", ".safetensors", ".bin") and file.is_file():
            size = file.stat().st_size
            with file.open("rb") as stream:
                head = stream.read(edge)
                stream.seek(max(size - edge, 0))
                parts.append(f"{file.relative_to(folder)} {size} {_digest(head + stream.read(edge))}")
    return _digest("\n".join(parts).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


ENCODERS: dict[str, Callable[[EncoderConfig], Encoder]] = {
    "sentence": lambda cfg: SentenceEncoder(cfg.path, cfg.prefix),
    "tfidf": lambda cfg: TfidfEncoder.load(cfg.path),
    "hash": lambda cfg: HashEncoder(),
}
