"""The ways in which published search agents and their retrieval servers talk, both sides of each.

A server reads a request with `read_request` and answers with `Request.render`; a client asks with a `Dialect` and
understands any known answer with `read_response`. The shapes are those that the published clients send and take apart:

    dialect         path           request                              answer
    search_r1       /retrieve      {queries, topk, return_scores}       {result: [[{document: {id, contents}, score}]]}
                                   return_scores false or absent        {result: [[{id, contents}]]}
    skyrl           /retrieve      {query, topk, return_scores}         as search_r1, with one list
    zerosearch      /retrieve      {query, top_k}                       [{text}]
    flashrag        /search        {query, top_n, return_score}         [{id, contents}], or [[...], [scores]]
    flashrag_batch  /batch_search  {query: [...], top_n, return_score}  [[{id, contents}]], or [[[...]], [[scores]]]
    r1_searcher     /queries       {queries, k}                         {queries, answers: [[contents]]}

ReSearch and ReCall speak flashrag. A number that is absent or null means the server's own. Search-R1's reranking
servers are asked with topk_retrieval and topk_rerank: the latter counts.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hiexp.corpora import contents, titled
from hiexp.raw_text import HALF, mended
from hiexp.search_types import ScoredDocument
from hiexp.trajectory import Document

Results = list[list[ScoredDocument]]


class RequestError(ValueError):
    """A request that no dialect allows; the message is for whoever sent it."""


class SchemaError(ValueError):
    """An answer that no known server gives; the message names the offending keys or numbers."""


@dataclass(frozen=True)
class Limits:
    """What a server takes in one request."""

    default_top_k: int
    max_top_k: int
    max_queries: int
    max_characters: int
    """of one query"""


@dataclass(frozen=True)
class Request:
    """A request that was understood, and how its answer is written."""

    queries: list[str]
    top_k: int
    render: Callable[[Results], Any]


def read_request(path: str, body: Any, limits: Limits) -> Request:
    """The request in a JSON body posted to one of PATHS; RequestError tells what is wrong with it."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {type(body).__name__}")
    names = [name for name in ("queries", "query") if name in body]
    if len(names) != 1:
        raise RequestError(f"exactly one of the keys queries and query is needed; got: {_keys(body)}")
    asked = body[names[0]]
    queries = asked if isinstance(asked, list) else [asked]
    _check_queries(names[0], queries, limits)
    flag = next((body[name] for name in ("return_scores", "return_score") if body.get(name) is not None), None)
    if flag not in (None, True, False):
        raise RequestError(f"return_scores must be true or false, not {flag!r}")
    return Request(queries, _top_k(body, limits), PATHS[path](body, queries, isinstance(asked, str), bool(flag)))


def _check_queries(name: str, queries: list[Any], limits: Limits) -> None:
    if len(queries) > limits.max_queries:
        raise RequestError(f"{len(queries)} queries in one request; at most {limits.max_queries} are taken")
    for query in queries:
        if not isinstance(query, str):
            raise RequestError(f"{name} must hold text, not {type(query).__name__}")
        if HALF.search(query):
            raise RequestError(f"{name} holds half of a surrogate pair (\\ud...), which is no text")
        if len(query) > limits.max_characters:
            raise RequestError(f"a query of {len(query)} characters; at most {limits.max_characters} are taken")


def _top_k(body: Mapping[str, Any], limits: Limits) -> int:
    for name in ("topk_rerank", "topk", "top_k", "top_n", "k"):
        if body.get(name) is not None:
            value = body[name]
            if type(value) is not int or not 1 <= value <= limits.max_top_k:
                raise RequestError(f"{name}={value!r} must be a whole number from 1 to {limits.max_top_k}")
            return value
    return limits.default_top_k


def _bare(found: ScoredDocument) -> dict[str, str]:
    return {"id": found.id, "contents": contents(found.document)}


def _render_retrieve(body: Mapping[str, Any], queries: list[str], is_single: bool, scores: bool) -> Any:
    if is_single and "top_k" in body:  # ZeroSearch
        return lambda results: [{"text": contents(one.document)} for one in results[0]]
    if scores:
        scored = lambda one: {"document": _bare(one), "score": one.score}  # noqa: E731
        return lambda results: {"result": [[scored(one) for one in found] for found in results]}
    return lambda results: {"result": [[_bare(one) for one in found] for found in results]}


def _render_search(body: Mapping[str, Any], queries: list[str], is_single: bool, scores: bool) -> Any:
    if not is_single:
        raise RequestError("/search takes one query as text; post several to /batch_search")
    bare = lambda results: [_bare(one) for one in results[0]]  # noqa: E731
    return (lambda results: [bare(results), [one.score for one in results[0]]]) if scores else bare


def _render_batch(body: Mapping[str, Any], queries: list[str], is_single: bool, scores: bool) -> Any:
    if is_single:
        raise RequestError("/batch_search takes a list of queries; post one as text to /search")
    bare = lambda results: [[_bare(one) for one in found] for found in results]  # noqa: E731
    return (lambda results: [bare(results), [[one.score for one in row] for row in results]]) if scores else bare


def _render_queries(body: Mapping[str, Any], queries: list[str], is_single: bool, scores: bool) -> Any:
    if is_single:
        raise RequestError("/queries takes a list of queries")
    texts = lambda results: [[contents(one.document) for one in found] for found in results]  # noqa: E731
    return lambda results: {"queries": queries, "answers": texts(results)}


PATHS: dict[str, Callable[[Mapping[str, Any], list[str], bool, bool], Callable[[Results], Any]]] = {
    "/retrieve": _render_retrieve,
    "/search": _render_search,
    "/batch_search": _render_batch,
    "/queries": _render_queries,
}


@dataclass(frozen=True)
class Dialect:
    """How a client asks."""

    path: str
    takes_many: bool
    """several queries in one request"""
    body: Callable[[Sequence[str], int], dict[str, Any]]


DIALECTS: dict[str, Dialect] = {
    "search_r1": Dialect(
        "/retrieve", True, lambda queries, k: {"queries": list(queries), "topk": k, "return_scores": True}
    ),
    "skyrl": Dialect("/retrieve", False, lambda queries, k: {"query": queries[0], "topk": k, "return_scores": True}),
    "zerosearch": Dialect("/retrieve", False, lambda queries, k: {"query": queries[0], "top_k": k}),
    "flashrag": Dialect("/search", False, lambda queries, k: {"query": queries[0], "top_n": k, "return_score": False}),
    "flashrag_batch": Dialect(
        "/batch_search", True, lambda queries, k: {"query": list(queries), "top_n": k, "return_score": False}
    ),
    "r1_searcher": Dialect("/queries", True, lambda queries, k: {"queries": list(queries), "k": k}),
}


def read_response(payload: Any, count: int) -> Results:
    """The passages in the answer to `count` queries, whichever known server gave it; SchemaError for any other.

    What a server leaves out is made up so that order and identity stay: the score is 1 / rank, the id a hash of the
    text. A passage that comes twice for one query is kept once.
    """
    rows, scores, may_be_flat = payload, None, True
    if isinstance(payload, dict):
        names = [name for name in ("result", "results", "answers") if name in payload]
        if len(names) != 1:
            raise SchemaError(f"the answer has the keys {_keys(payload)}; one of result, results, answers is needed")
        rows, may_be_flat = payload[names[0]], names[0] == "results"
    if not isinstance(rows, list):
        raise SchemaError(f"the answer is {_kind(rows)}, where a list of results is needed")
    if len(rows) == 2 and _is_scores(rows[1]) and isinstance(rows[0], list):
        rows, scores = rows
    is_flat = not any(isinstance(row, list) for row in rows) and (may_be_flat or rows)
    if count == 1 and is_flat:
        rows, scores = [rows], None if scores is None else [scores]
    if len(rows) != count:
        raise SchemaError(f"the answer has {len(rows)} lists of results for {count} queries")
    if scores is not None and [_length(row) for row in scores] != [_length(row) for row in rows]:
        raise SchemaError("the answer has other numbers of scores than of passages")
    return [_row(row, scores[i] if scores is not None else None) for i, row in enumerate(rows)]


def _is_scores(value: Any) -> bool:
    """A list of numbers, or of lists of numbers, with at least one number in it."""
    if not isinstance(value, list) or not value:
        return False
    flat = [number for row in value for number in row] if all(isinstance(row, list) for row in value) else value
    return bool(flat) and all(_is_number(number) for number in flat)


def _row(row: Any, scores: list[Any] | None) -> list[ScoredDocument]:
    if not isinstance(row, list):
        raise SchemaError(f"the results of a query are {_kind(row)}, where a list is needed")
    found: dict[tuple[str, str], ScoredDocument] = {}
    for place, item in enumerate(row):
        one = _passage(item, scores[place] if scores is not None else 1 / (place + 1))
        if one.document.title or one.document.text:
            found.setdefault((one.document.title, one.document.text), one)
    if row and not found:
        raise SchemaError(f"all {len(row)} results of a query are empty")
    return list(found.values())


def _passage(item: Any, score: Any) -> ScoredDocument:
    if isinstance(item, str):
        item = {"contents": item}
    if not isinstance(item, dict):
        raise SchemaError(f"a result is {_kind(item)}, where an object or a text is needed")
    score = item["score"] if item.get("score") is not None else score
    inner = item.get("document", item)
    inner = {"contents": inner} if isinstance(inner, str) else inner
    if not isinstance(inner, dict):
        raise SchemaError(f"the document of a result is {_kind(inner)}, where an object or a text is needed")
    name = next((name for name in ("contents", "text", "content") if isinstance(inner.get(name), str)), None)
    if name is None:
        raise SchemaError(f"a result has the keys {_keys(inner)}; a text in contents, text or content is needed")
    if not _is_number(score):
        raise SchemaError(f"the score of a result is {_kind(score)}, where a number is needed")
    title, text = inner.get("title"), mended(inner[name])
    title = mended(title).strip() if isinstance(title, str) else None
    document = titled(title, text) if title is None or name == "contents" else Document(title, text.strip())
    key = next((inner[key] for key in ("id", "_id", "docid", "url") if isinstance(inner.get(key), (str, int))), None)
    made = hashlib.sha256(f"{document.title}\n{document.text}".encode("utf-8", "replace")).hexdigest()[:16]
    return ScoredDocument(made if key is None else mended(str(key)), float(score), document)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _length(row: Any) -> int:
    return len(row) if isinstance(row, list) else -1


def _keys(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(record)[:8])) or "(none)"


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
