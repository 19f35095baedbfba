"""Which well-formed lessons must not enter a HEK: those that tell an answer, name an entity, are too long, say
nothing, or are in another language than was asked for. Pure text.

Each filter gives a word that the BuildReport counts. All err on the side of dropping, since a dropped reply is asked
for again; near duplicates are merged after embedding (`build.merge_threshold`). Whether a lesson is an instruction is
not judged: no cheap test of the imperative holds even for English ("first the label, then its city").
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from hiexp.encoder import UNSPACED
from hiexp.metrics import normalise

MAX_TITLE_WORDS = 24
MAX_DESCRIPTION_WORDS = {1: 80, 2: 60, 3: 60}
CHARACTERS_PER_WORD = 12
"""a text of so many characters per allowed word is too long as well, whatever its spaces"""

LANGUAGES = {
    "arabic": "ar",
    "chinese": "zh",
    "dutch": "nl",
    "english": "en",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "hebrew": "he",
    "hindi": "hi",
    "italian": "it",
    "japanese": "ja",
    "korean": "ko",
    "portuguese": "pt",
    "russian": "ru",
    "spanish": "es",
    "thai": "th",
}
"""what `guess_language` knows, by English name; a script stands for its largest language"""

_SCRIPTS = {
    "ARABIC": "ar",
    "CJK": "zh",
    "CYRILLIC": "ru",
    "DEVANAGARI": "hi",
    "GREEK": "el",
    "HANGUL": "ko",
    "HEBREW": "he",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "THAI": "th",
}
_COMMON_WORDS = {
    "de": "der die das und ist nicht ein eine einen zu mit von den dem wenn fur auf im wer was nach zuerst dann sie",
    "en": "the of and to in is a for that with when which not by from if before are it be what who then both at on",
    "es": "el la los las y es una un para en que de del con no cuando por primero si su se quien donde cual cuyo fue",
    "fr": "le la les des et est une un pour dans que qui du de pas quand avec sur au par si deux",
    "it": "il lo gli la della di e che una un per non con quando nel sono prima se i le",
    "nl": "de het een en van is niet op met voor dat als te bij eerst dan zijn",
    "pt": "o a os as e da do de uma um para em que com nao quando por se dos primeiro",
}
_STOP_WORDS = {code: frozenset(words.split()) for code, words in _COMMON_WORDS.items()}
_UNSPACED = re.compile(f"[{UNSPACED}]")

_WORDS = {
    "closed answers": "yes no true false none both neither noanswer oui non nein ja si",
    "openers": "a an are at by can compute did do does find for from given has have how if in is it let of on prove "
    "show suppose the to under was were what when where which who whom whose why with",
    "months": "jan feb mar apr may jun jul aug sep oct nov dec",
    "numbers from ten": "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty",
}
_CLOSED_ANSWERS = frozenset(_WORDS["closed answers"].split())
_BOILERPLATE_TITLES = frozenset(
    (
        "title",
        "untitled",
        "lesson",
        "lesson title",
        "lesson learned",
        "experience",
        "summary",
        "general advice",
        "general lesson",
        "string",
        "na",
        "none",
        "null",
        "when it applies",
        "when lesson applies",
        "when lesson applies at most 24 words",
        "when it applies at most 24 words",
    )
)
"""normalised; what a model writes that fills in the form without reading"""
_BOILERPLATE_TEXT = re.compile(
    r"(as an ai\b|i('m| am) (sorry|unable)|i can ?not (help|assist|fulfil)|what to do and what to avoid|string$|n/?a$)"
)
_OPENERS = frozenset(_WORDS["openers"].split())
"""words that begin a sentence with a capital and are no part of a name"""

_NAME = re.compile(r"[A-Z][A-Za-z]*")
_QUOTED = re.compile("[\u201c\u300a\u300c\u300e\u3010\u00ab]([^\u201d\u300b\u300d\u300f\u3011\u00bb]+)")
_FORMULA = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
_MONTHS = _WORDS["months"].split()
_MONTH = f"({'|'.join(_MONTHS)})[a-z]*"
_DATES = (
    (re.compile(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? {_MONTH}\.?,? (\d{{4}})\b"), "dmy"),
    (re.compile(rf"\b{_MONTH}\.? (\d{{1,2}})(?:st|nd|rd|th)?,? (\d{{4}})\b"), "mdy"),
    (re.compile(r"\b(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})\b"), "ymd"),
    (re.compile(r"\b(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})\b"), "dmy"),
    (re.compile(r"\b(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})\b"), "mdy"),
    (re.compile("(\\d{4})\\s*\u5e74\\s*(\\d{1,2})\\s*\u6708\\s*(\\d{1,2})\\s*\u65e5"), "ymd"),
)
_NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\w,]|\.\d)|(?<![\w.])\d+(?:\.\d+)?(?!\w|\.\d)")
_NUMBER_WORDS = _WORDS["numbers from ten"].split()
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_LATEX_NOISE = re.compile(r"\\(?:left|right|boxed|text|mathrm|[,;:! ()\[\]])|[${}]")
_OPERATOR = re.compile(r"\s*([-+*/=^_,()|<>])\s*")


def turn_down(
    reply: dict[str, Any],
    level: int,
    questions: Sequence[str],
    golds: Sequence[str],
    language: str | None = None,
    examples: Sequence[str] = (),
) -> str | None:
    """Why a well-formed reply must not enter the HEK, or None.

    `language` is the one that was asked for, by its English name; `examples` is what the prompt's own examples say.
    Reasons: empty_title, empty_description, boilerplate_title, boilerplate_description, title_too_long,
    description_too_long, copied_example, gold_leak, entity_name, wrong_language.
    """
    title, description = reply["title"], reply["description"]
    for field, most in (("title", MAX_TITLE_WORDS), ("description", MAX_DESCRIPTION_WORDS[level])):
        if not re.search(r"\w", reply[field]):
            return f"empty_{field}"
        if num_words(reply[field]) > most or len(reply[field]) > CHARACTERS_PER_WORD * most:
            return f"{field}_too_long"
    if normalise(title) in _BOILERPLATE_TITLES:
        return "boilerplate_title"
    if _BOILERPLATE_TEXT.match(description.casefold().replace("\u2019", "'")):
        return "boilerplate_description"
    if any(_repeats(text, example) for text in (title, description) for example in examples):
        return "copied_example"
    if any(tells(gold, (title, description)) for gold in golds):
        return "gold_leak"
    words = f" {_bare(title)} "
    if any(name in words if _UNSPACED.search(name) else f" {name} " in words for name in _names(questions)):
        return "entity_name"
    return "wrong_language" if _is_other_language(f"{title} {description}", language) else None


def _repeats(text: str, example: str) -> bool:
    """Whether a text holds an example's sentence, or is a part of it of three words or more; case and signs aside."""
    said, shown = f" {_bare(text)} ", f" {_bare(example)} "
    return shown in said or (said in shown and len(said.split()) > 2)


def tells(gold: str, texts: Sequence[str]) -> bool:
    """Whether a text gives the answer away, in whatever spelling.

    Answers of two words, or of four letters, count as words; those of scripts without spaces from two letters on;
    numbers from two digits on, by value ("1,200" is 1200); dates by their day or by their year alone; formulas with
    a sign in them by their form. Never yes, no and the like: every lesson may use these words.
    """
    folded, bodies = _fold(gold), [_fold(text) for text in texts]
    plain = normalise(folded)
    if plain in _CLOSED_ANSWERS:
        return False
    if _UNSPACED.search(folded) and len(_bare(folded)) >= 2 and any(_bare(folded) in _bare(body) for body in bodies):
        return True
    if " " in plain or len(plain) >= 4:
        for form in (normalise, _bare):  # "New-York" is "newyork" in the one and "new york" in the other
            if form(folded) and f" {form(folded)} " in f" {' | '.join(form(body) for body in bodies)} ":
                return True
    body = " | ".join(bodies)
    return _same_date(folded, body) or _same_number(folded, body) or _same_formula(gold, texts)


def entity_names(question: str) -> list[str]:
    """Runs of capitalised words, lower-cased, and what stands in quotation marks that are no apostrophes.

    The first word of a sentence is left out unless a capitalised one follows that makes a name with it. What is
    compared is the whole run: "The Hobbit" does not bar a title with "the". Single letters and formulas are passed
    over.
    """
    names, run, is_first = [_bare(quoted) for quoted in _QUOTED.findall(question)], [], True
    words = _FORMULA.sub(" , ", question).split()
    for word, following in zip([*words, ""], [*words[1:], "", ""], strict=False):
        bare = re.sub("['\u2019]s$", "", word.strip("\"'()[]{}?!.,:;\u201c\u201d\u2018"))
        joins_next = bare.casefold() not in _OPENERS and following[:1].isupper() and word[-1:].isalnum()
        is_name = bare[:1].isupper() and (joins_next or not is_first)
        if is_name:
            run.append(bare)
        if run and (not is_name or word[-1] in "?!.,:;"):
            names.append(_bare(" ".join(run)))
            run = []
        is_first = word[-1:] in ("?", "!", ".") and len(bare) > 1
    return list(dict.fromkeys(name for name in names if len(name) > 1))


def num_words(text: str) -> int:
    """Words between spaces; in scripts without them, two letters are a word."""
    unspaced = len(_UNSPACED.findall(text))
    return len(_UNSPACED.sub(" ", text).split()) + (unspaced + 1) // 2 if unspaced else len(text.split())


def guess_language(text: str, among: Collection[str] = ()) -> str:
    """A code of LANGUAGES from the script, for Latin letters from common words; "" where that tells too little.

    `among`: languages that are likely. Of these the one that has the most common words of a short Latin text, even a
    single one, is taken; where only one of them is written in Latin letters, that one.
    """
    text = re.sub(r"\\[A-Za-z]+", " ", _FORMULA.sub(" ", text))
    # names keep their letters in text of another script
    scripts = Counter(_script(letter) for letter in _NAME.sub("", text) if letter.isalpha())
    counts, letters = Counter[str](), scripts.total()
    for name, code in _SCRIPTS.items():
        counts[code] += scripts[name]
    if counts["ja"] * 10 > letters:
        counts["ja"] += counts.pop("zh")
    best = max(counts, key=lambda code: counts[code])
    if counts[best] * 10 > letters * 3:
        return best
    hits = sorted(((n, code) for code, n in _common_words(text).items()), reverse=True)
    (most, code), (second, _) = hits[:2]
    if most >= 2 and 2 * most >= 3 * second:
        return code
    likely = [(n, code) for n, code in hits if code in among] if 2 * scripts["LATIN"] >= letters else []
    return likely[0][1] if likely and (len(likely) == 1 or likely[0][0] > likely[1][0]) else ""


def _is_other_language(text: str, language: str | None) -> bool:
    """Only where both are sure: three common words more than the wanted language has, or another script."""
    wanted = LANGUAGES.get(language.casefold()) if language else None
    guess = guess_language(text)
    if not wanted or not guess or guess == wanted:
        return False
    counts = _common_words(text)
    return guess not in counts or wanted not in counts or counts[guess] >= counts[wanted] + 3


def _script(letter: str) -> str:
    return "LATIN" if letter.isascii() else unicodedata.name(letter, "").partition(" ")[0].partition("-")[0]


def _common_words(text: str) -> dict[str, int]:
    words = re.findall(r"\w+", _fold(text))
    counts = {code: sum(word in common for word in words) for code, common in _STOP_WORDS.items()}
    counts["es"] += 2 * ("\u00bf" in text)  # no other of these has this mark
    return counts


def _names(questions: Sequence[str]) -> list[str]:
    return [name for question in questions for name in entity_names(question)]


def _fold(text: str) -> str:
    """Lower case, full-width forms as ASCII, Latin letters without accents."""
    parts = unicodedata.normalize("NFKD", text.casefold())
    return unicodedata.normalize("NFC", "".join(part for part in parts if not "\u0300" <= part <= "\u036f"))


def _bare(text: str) -> str:
    return " ".join(re.findall(r"\w+", _fold(text)))


def _dates(text: str) -> set[tuple[int, int, int]]:
    """(year, month, day) of every date in folded text; both readings of 3/4/1999."""
    dates = set()
    for pattern, order in _DATES:
        for groups in pattern.findall(text):
            parts = dict(zip(order, groups, strict=True))
            month = _MONTHS.index(parts["m"]) + 1 if parts["m"] in _MONTHS else int(parts["m"])
            if 1 <= month <= 12:
                dates.add((int(parts["y"]), month, int(parts["d"])))
    return dates


def _same_date(gold: str, body: str) -> bool:
    dates = _dates(gold)
    return bool(dates & _dates(body)) or any(re.search(rf"(?<!\d){year}(?!\d)", body) for year, _, _ in dates)


def _numbers(text: str) -> set[str]:
    """Values of two digits or more, as text without separators and needless zeros."""
    found = {number.replace(",", "") for number in _NUMBER.findall(text)}
    found |= {str(10 + _NUMBER_WORDS.index(word)) for word in text.split() if word in _NUMBER_WORDS}
    found = {number.rstrip("0").rstrip(".") if "." in number else number for number in found}
    return {number for number in found if len(number.replace(".", "")) >= 2}


def _same_number(gold: str, body: str) -> bool:
    """For an answer that is one number, perhaps with a unit or a sign of money."""
    rest = _NUMBER.sub("", gold, count=1) if _NUMBER.search(gold) else ("" if gold in _NUMBER_WORDS else None)
    if rest is None or len(rest.split()) > 1 or re.search(r"\d", rest):
        return False
    return bool(_numbers(gold) & _numbers(body))


def _same_formula(gold: str, texts: Sequence[str]) -> bool:
    form = _formula(gold)
    if len(form) < 3 or not re.search(r"[\\+*/=^_(]", form) or not re.search(r"\w", form):
        return False
    pattern = re.compile(rf"(?<![\w.]){re.escape(form)}(?!\w|\.\d)")
    return any(pattern.search(_formula(text)) for text in texts)


def _formula(text: str) -> str:
    r"""`\dfrac{3}{4}` and `\frac34` as 3/4, without dollars, braces, `\left` and spaces around signs."""
    text = _FRACTION.sub(lambda found: "/".join(part for part in found.groups() if part is not None), text)
    return _OPERATOR.sub(r"\1", _LATEX_NOISE.sub("", text)).strip()
