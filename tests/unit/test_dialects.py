"""Requests and answers of the published agents and servers, written out by hand.

Must fail when: a shape has other keys; a request without a number gets none; a passage is given to another query; an
unknown answer is guessed at, or its keys are not told; title and text do not come back as they went.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiexp.dialects import DIALECTS, PATHS, Limits, RequestError, SchemaError, read_request, read_response
from hiexp.search_types import ScoredDocument
from hiexp.trajectory import Document

LIMITS = Limits(default_top_k=3, max_top_k=10, max_queries=4, max_characters=100)
OSLO = ScoredDocument("p1", 2.5, Document("Oslo", "A city.\nIn Norway."))
BARE = ScoredDocument("p2", 0.5, Document("", "No title."))
OSLO_OUT, BARE_OUT = {"id": "p1", "contents": '"Oslo"\nA city.\nIn Norway.'}, {"id": "p2", "contents": '""\nNo title.'}
TWO = [[OSLO, BARE], [BARE]]


@pytest.mark.parametrize(
    ("path", "body", "results", "answer"),
    [
        (
            "/retrieve",
            {"queries": ["a", "b"], "topk": 2, "return_scores": True},
            TWO,
            {
                "result": [
                    [{"document": OSLO_OUT, "score": 2.5}, {"document": BARE_OUT, "score": 0.5}],
                    [{"document": BARE_OUT, "score": 0.5}],
                ]
            },
        ),
        (
            "/retrieve",
            {"queries": ["a", "b"], "topk": 2, "return_scores": False},
            TWO,
            {"result": [[OSLO_OUT, BARE_OUT], [BARE_OUT]]},
        ),
        ("/retrieve", {"queries": ["a", "b"]}, TWO, {"result": [[OSLO_OUT, BARE_OUT], [BARE_OUT]]}),
        (
            "/retrieve",
            {"query": "a", "topk": 2, "return_scores": True},
            [[OSLO]],
            {"result": [[{"document": OSLO_OUT, "score": 2.5}]]},
        ),
        (
            "/retrieve",
            {"query": "a", "top_k": 2},
            [[OSLO, BARE]],
            [{"text": OSLO_OUT["contents"]}, {"text": BARE_OUT["contents"]}],
        ),
        ("/search", {"query": "a", "top_n": 2, "return_score": False}, [[OSLO, BARE]], [OSLO_OUT, BARE_OUT]),
        (
            "/search",
            {"query": "a", "top_n": 2, "return_score": True},
            [[OSLO, BARE]],
            [[OSLO_OUT, BARE_OUT], [2.5, 0.5]],
        ),
        ("/batch_search", {"query": ["a", "b"], "top_n": 2}, TWO, [[OSLO_OUT, BARE_OUT], [BARE_OUT]]),
        (
            "/batch_search",
            {"query": ["a", "b"], "return_score": True},
            TWO,
            [[[OSLO_OUT, BARE_OUT], [BARE_OUT]], [[2.5, 0.5], [0.5]]],
        ),
        (
            "/queries",
            {"queries": ["a", "b"], "k": 2},
            TWO,
            {"queries": ["a", "b"], "answers": [[OSLO_OUT["contents"], BARE_OUT["contents"]], [BARE_OUT["contents"]]]},
        ),
        ("/retrieve", {"queries": []}, [], {"result": []}),
    ],
)
def test_each_answer_has_the_shape_its_client_takes_apart(path, body, results, answer):
    asked = read_request(path, body, LIMITS)
    sent = body.get("queries", body.get("query"))
    assert asked.queries == ([sent] if isinstance(sent, str) else sent)
    assert json.loads(json.dumps(asked.render(results))) == answer


@pytest.mark.parametrize(
    ("body", "top_k"),
    [
        ({"queries": ["a"], "topk": None}, 3),
        ({"queries": ["a"]}, 3),
        ({"queries": ["a"], "topk": 7}, 7),
        ({"queries": ["a"], "topk_retrieval": 10, "topk_rerank": 4}, 4),
        ({"queries": ["a"], "topk": 10, "topk_rerank": 4}, 4),
        ({"query": "a", "top_k": 2}, 2),
    ],
)
def test_how_many_passages_are_asked_for(body, top_k):
    assert read_request("/retrieve", body, LIMITS).top_k == top_k


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/retrieve", ["a"], "JSON object, not list"),
        ("/retrieve", {"q": "a", "k": 3}, "got: 'q', 'k'"),
        ("/retrieve", {"query": "a", "queries": ["b"]}, "exactly one"),
        ("/retrieve", {"queries": ["a", 3]}, "not int"),
        ("/retrieve", {"queries": None}, "not NoneType"),
        ("/retrieve", {"queries": ["a"] * 5}, "at most 4"),
        ("/retrieve", {"queries": ["a" * 101]}, "101 characters"),
        ("/retrieve", {"queries": ["a"], "topk": 11}, "from 1 to 10"),
        ("/retrieve", {"queries": ["a"], "topk": 0}, "topk=0"),
        ("/retrieve", {"queries": ["a"], "topk": "3"}, "topk='3'"),
        ("/retrieve", {"queries": ["a"], "topk": True}, "topk=True"),
        ("/retrieve", {"queries": ["a"], "return_scores": "yes"}, "true or false"),
        ("/search", {"query": ["a"]}, "/batch_search"),
        ("/batch_search", {"query": "a"}, "/search"),
        ("/queries", {"queries": "a"}, "list"),
    ],
)
def test_a_request_of_no_dialect_is_refused(path, body, told):
    with pytest.raises(RequestError, match=told):
        read_request(path, body, LIMITS)


KNOWN = [
    {"result": [[{"document": {"id": "p1", "contents": '"T"\nx'}, "score": 0.5}], []]},
    {"result": [[{"contents": '"T"\nx', "id": "p1"}], []]},
    {"results": [[{"title": "T", "text": "x", "id": "p1", "score": 1}], []]},
    {"result": [[{"document": '"T"\nx', "score": 0.5}], []]},
    [[{"id": "p1", "contents": '"T"\nx'}], []],
    [[[{"id": "p1", "contents": "T\nx"}], []], [[0.5], []]],
    {"queries": ["a", "b"], "answers": [['"T"\nx'], []]},
    {"results": [[{"title": "T", "content": "x", "url": "p1", "score": 0.9, "raw_content": None}], []]},
]


@pytest.mark.parametrize("payload", KNOWN, ids=str)
def test_B93_known_answers_become_title_text_score_and_id(payload):
    first, second = read_response(payload, 2)
    assert second == [] and [one.document for one in first] == [Document("T", "x")]
    assert first[0].id == "p1" or "answers" in payload or isinstance(first[0].id, str)
    if "p1" in str(payload):
        assert first[0].id == "p1"
    assert first[0].score == {0: 0.5, 5: 0.5, 3: 0.5, 2: 1.0, 7: 0.9}.get(KNOWN.index(payload), 1.0)


@pytest.mark.parametrize(
    "payload",
    [
        [{"text": "T\nx"}, {"text": "y"}],
        [{"id": 1, "contents": "T\nx"}, {"id": 2, "contents": "y"}],
        {"result": [[{"contents": "T\nx"}, {"contents": "y"}]]},
        [[{"id": "1", "contents": "T\nx"}, {"id": "2", "contents": "y"}], [0.9, 0.1]],
    ],
    ids=str,
)
def test_one_query_may_be_answered_flat(payload):
    (found,) = read_response(payload, 1)
    assert [one.document for one in found] == [Document("T", "x"), Document("", "y")]
    assert found[0].score > found[1].score


@pytest.mark.parametrize("payload", [[], [[]], {"results": []}, {"result": [[]]}], ids=str)
def test_nothing_found_is_an_empty_list(payload):
    assert read_response(payload, 1) == [[]]


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"hits": [[]], "took": 3}, "'hits', 'took'"),
        ({"result": [[]], "results": [[]]}, "'result', 'results'"),
        ({"result": [[{"passage": "x", "rank": 1}], []]}, "'passage', 'rank'"),
        ({"result": [[{"document": {"body": "x"}}], []]}, "'body'"),
        ({"result": [[{"contents": None}], []]}, "'contents'"),
        ({"result": [[{"contents": "x", "score": "high"}], []]}, "'high'"),
        ({"result": [[3], []]}, "int '3'"),
        ({"result": [None, []]}, "null"),
        ({"result": None}, "null"),
        ({"result": [[], [], []]}, "3 lists of results for 2 queries"),
        ({"result": [[]]}, "1 lists of results for 2 queries"),
        ({"detail": "validation error"}, "'detail'"),
        ("sorry", "str 'sorry'"),
        ([[["x"], ["y"]], [[0.5], [0.5, 0.1]]], "numbers of scores"),
    ],
)
def test_B93_unknown_answers_are_refused_by_their_keys(payload, told):
    with pytest.raises(SchemaError, match=told):
        read_response(payload, 2)


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
documents = st.builds(Document, texts.map(lambda t: " ".join(t.split())), texts.map(str.strip).filter(bool))


@given(st.lists(st.lists(documents, max_size=3, unique=True), min_size=1, max_size=4), st.data())
def test_what_a_server_writes_its_client_reads(rows, data):
    """For every dialect, with titles in quotes, texts of many lines and no title at all."""
    name = data.draw(st.sampled_from(sorted(DIALECTS)))
    dialect = DIALECTS[name]
    rows = rows if dialect.takes_many else rows[:1]
    queries = [f"q{i}" for i in range(len(rows))]
    results = [
        [ScoredDocument(f"{i}-{j}", 1.0 - j / 10, one) for j, one in enumerate(row)] for i, row in enumerate(rows)
    ]
    asked = read_request(dialect.path, json.loads(json.dumps(dialect.body(queries, 3))), LIMITS)
    assert asked.queries == queries and asked.top_k == 3
    read = read_response(json.loads(json.dumps(asked.render(results))), len(queries))
    assert [[one.document for one in row] for row in read] == rows
    if name not in ("zerosearch", "r1_searcher"):
        assert [[one.id for one in row] for row in read] == [[one.id for one in row] for row in results]


def test_every_dialect_goes_to_a_path_that_is_served():
    assert {dialect.path for dialect in DIALECTS.values()} == set(PATHS)
