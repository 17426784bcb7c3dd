"""Surface features of a prompt that predict answer length: counts, openings and words, no learned tokenizer.

The cost is bounded by :data:`READ_CHARACTERS`: of a longer prompt only the beginning and the end are read, and its
whole length is one of the features. Any ``str`` is accepted, including the empty one and lone surrogates.
"""

from __future__ import annotations

import math
import re

import numpy as np

from joulery.domain.arrays import FloatArray

READ_CHARACTERS = 6_000
"""Characters of a prompt that are read: two thirds at its beginning, the rest at its end."""

_OPENINGS: tuple[str, ...] = (
    *("what", "how", "why", "who", "when", "where", "which", "can", "could", "would", "should", "is", "are", "do"),
    *(
        "does",
        "did",
        "write",
        "give",
        "create",
        "make",
        "list",
        "explain",
        "describe",
        "i",
        "i'm",
        "you",
        "your",
        "the",
    ),
    *("a", "please", "tell", "if", "hi", "in", "for", "find", "provide", "generate", "rewrite", "convert", "come"),
    *("suggest", "given", "answer", "this", "my", "we"),
)

_TOPICS: tuple[tuple[str, str], ...] = (
    ("essay", r"essays?|articles?|reports?|thesis|speech"),
    ("story", r"story|stories|tale|novel|chapter|scene|fiction|script for"),
    ("poem", r"poems?|poetry|haiku|lyrics|songs?|rap|limerick"),
    ("code", r"code|coding|program(?:ming)?|functions?|implement|algorithm|class|debug|compile"),
    ("language", r"python|java|javascript|c\+\+|rust|html|css|sql|bash|ruby|react|latex|lua|php|excel"),
    ("script", r"scripts?|api|app|bot|website|server|database|query"),
    ("list", r"lists?|enumerate|bullet(?:ed)?|points?"),
    ("steps", r"steps?|step-by-step|guide|tutorial|instructions|procedure|how to"),
    ("detail", r"details?|detailed|in-depth|comprehensive|thorough(?:ly)?|elaborate|expand|long"),
    ("explain", r"explain|explanation|describe|discuss|elaborate"),
    ("brief", r"brief(?:ly)?|short|concise(?:ly)?|quick|simple|tl;dr|single"),
    ("summary", r"summari[sz]e|summary|main ideas?|key points|abstract"),
    ("recipe", r"recipes?|cook|dish(?:es)?|ingredients|bake|meal"),
    ("translate", r"translate|translation|french|spanish|german|chinese|japanese|english"),
    ("classify", r"classify|identify|categori[sz]e|label|sentiment|detect|determine|whether"),
    ("correct", r"correct|grammar|grammatical(?:ly)?|edit|proofread|errors?|mistakes?|spelling"),
    ("rewrite", r"rewrite|rephrase|paraphrase|reword|make it|improve|formal"),
    ("convert", r"convert|transform|format|into a|turn"),
    ("extract", r"extract|find|search|keywords|names?|mention(?:ed)?"),
    ("sentence", r"sentences?|phrases?|headline|title|slogan|motto|tweet|caption|tagline"),
    ("paragraph", r"paragraphs?"),
    ("letter", r"letters?|e-?mails?|message|invitation|response|reply|cover letter|resume"),
    ("blog", r"blog|post|linkedin|review|newsletter|marketing|advert\w*|listing"),
    ("plan", r"plan|itinerary|schedule|agenda|curriculum|syllabus|outline|strategy|trip"),
    ("example", r"examples?|sample|template|e\.g\."),
    ("compare", r"compare|comparison|contrast|differences?|similarit\w+|versus|vs|between|better"),
    ("table", r"tables?|csv|json|markdown|spreadsheet|columns?"),
    ("choice", r"yes or no|true or false|multiple choice|choose|option|select|pick|rank"),
    ("joke", r"jokes?|funny|pun|riddle|humou?r"),
    ("maths", r"calculate|solve|equation|sum|formula|probability|integral|prove|proof|math|numbers?"),
    ("many", r"how many|how much|how old|how long|how far|how tall"),
    ("identity", r"what is|what's|whats|who is|who was|what does|meaning|define|definition"),
    ("fact", r"when did|when was|where is|what year|which|name of|called|capital|first"),
    ("ideas", r"ideas|tips|ways|suggestions?|recommend\w*|advice|things|activities|brainstorm"),
    ("merits", r"benefits?|pros|cons|advantages|disadvantages|risks?|effects?|impact"),
    ("causes", r"causes?|why|reasons?|because|how come|happen(?:ed|s)?"),
    ("history", r"history|origins?|war|century|ancient|invented|evolution"),
    ("future", r"future|predict|years from now|would happen|hypothetical|imagine|if you"),
    ("analyse", r"analy[sz]e|analysis|evaluate|critique|argue|argument|assess"),
    ("design", r"design|build|develop|create|generate|make|compose|draft"),
    ("dialogue", r"dialogue|conversation|interview|chat|act as|pretend|role ?play|character"),
    ("product", r"product|company|business|startup|brand|customer|market"),
    ("science", r"physics|chemistry|biology|quantum|theory|science|scientific|energy|cells?"),
    ("health", r"health|doctor|disease|exercise|diet|sleep|symptoms|workout|pain"),
    ("learn", r"learn|teach|study|understand|course|explain like"),
    ("feeling", r"feel|feelings|love|friend|relationship|sad|angry|help me|my"),
    ("film", r"movies?|film|shows?|book|music|game|song|actor|band|series"),
    ("place", r"city|country|travel|visit|hotel|restaurant|museum|map"),
    ("questions", r"questions|quiz|test|faqs?|interview questions"),
    ("fill", r"given|following|below|based on|provided|input|output"),
    ("strict", r"only|exactly|without|do not|don't|must|no more than|at most|at least"),
    ("opinion", r"do you think|opinion|your favou?rite|do you|are you|can you"),
)

_WORD = re.compile(r"[^\W_]+(?:['\-][^\W_]+)*")
_WHOLE_WORD = re.compile(r"\w+")
_TOPIC_OF = [re.compile(rf"(?<!\w)(?:{pattern})(?!\w)") for _, pattern in _TOPICS]
_LONGEST_BEGINNING = 4
_ASKED_ITEMS = re.compile(
    r"\b(\d{1,3}|two|three|four|five|six|seven|eight|nine|ten|twenty) (?:\w+ ){0,2}"
    r"(?:ideas|tips|ways|things|examples|questions|points|reasons|items|names|steps|sentences|facts|words|jokes|titles)"
)
_ASKED_WORDS = re.compile(r"\b(\d{2,5})[ -]*(?:words?|characters?)\b")
_NUMBERS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twenty": 20,
}


def _first_letters(pattern: str) -> list[str]:
    """The letters that every match of each alternative of a topic's pattern begins with, at most four."""
    bare = re.sub(r"\([^()]*\)", "(", pattern)
    found = []
    for alternative in bare.split("|"):
        letters = re.match("[a-z]*", alternative)
        begun = letters[0] if letters else ""
        if alternative[len(begun) :][:1] in ("?", "*"):
            begun = begun[:-1]
        found.append(begun[:_LONGEST_BEGINNING])
    return found


def _topics_by_beginning() -> dict[str, int]:
    """Topics that a word of that beginning may belong to, one bit each."""
    topics: dict[str, int] = {}
    for place, (_, pattern) in enumerate(_TOPICS):
        for begun in _first_letters(pattern):
            topics[begun] = topics.get(begun, 0) | 1 << place
    return topics


_TOPICS_BY_BEGINNING = _topics_by_beginning()
_PUNCTUATION = "?!.,:;\"'`()[]{}<>|#*-/\\=+_%$&@"

FEATURES: tuple[str, ...] = (
    *("log_characters", "log_words", "log_lines", "log_sentences", "word_length", "upper_ratio", "digit_ratio"),
    *("space_ratio", "foreign_ratio", "distinct_words_ratio", "ends_with_question", "starts_lower", "log_last_line"),
    *("log_first_line", "log_first_sentence", "log_last_sentence", "asked_items", "asked_words", "one_word_lines"),
    *("questions_ratio", "numbered_lines", "body_ratio"),
    *(f"count {mark}" for mark in _PUNCTUATION),
    *(f"opens with {word}" for word in _OPENINGS),
    *(f"topic {name}" for name, _ in _TOPICS),
    *(f"early {name}" for name, _ in _TOPICS),
)
"""Name of each feature."""


def prompt_features(prompt: str) -> FloatArray:
    """The surface features of a prompt, float64[len(FEATURES)], finite; no unit."""
    text = prompt
    if len(prompt) > READ_CHARACTERS:
        tail = READ_CHARACTERS // 3
        text = f"{prompt[: READ_CHARACTERS - tail]}\n{prompt[-tail:]}"
    lower = text.lower()
    words = _WORD.findall(lower)
    values = [*_shape(prompt, text, words), *_asked(text, lower)]
    values += [math.log1p(text.count(mark)) for mark in _PUNCTUATION]
    first = words[0] if words else ""
    values += [float(first == word) for word in _OPENINGS]
    values += _topics(lower)
    return np.array(values, np.float64)


def _topics(lower: str) -> list[float]:
    """Number of mentions of each topic, at most 3, then whether it is named early.

    Only the few topics that some word's first letters allow are searched for, in a quarter of the time for all topics.
    """
    words = set(_WHOLE_WORD.findall(lower))
    starts = {word[:size] for word in words for size in range(1, _LONGEST_BEGINNING + 1)}
    possible = 0
    for start in starts & _TOPICS_BY_BEGINNING.keys():
        possible |= _TOPICS_BY_BEGINNING[start]
    named, early, opening = [0.0] * len(_TOPICS), [0.0] * len(_TOPICS), lower[:100]
    for place, pattern in enumerate(_TOPIC_OF):
        if possible >> place & 1:
            named[place] = min(3.0, float(len(pattern.findall(lower))))
            early[place] = float(pattern.search(opening) is not None)
    return named + early


def _shape(prompt: str, text: str, words: list[str]) -> list[float]:
    """Sizes of the prompt and its parts, and shares of its characters and words."""
    size = max(1, len(text))
    lines = [line for line in text.split("\n") if line.strip()] or [""]
    sentences = [part for part in re.split(r"[.!?]\s", text) if part.strip()] or [""]
    return [
        math.log1p(len(prompt)),
        math.log1p(len(words)),
        math.log1p(len(lines)),
        math.log1p(len(sentences)),
        sum(map(len, words)) / max(1, len(words)),
        sum(map(str.isupper, text)) / size,
        sum(map(str.isdigit, text)) / size,
        sum(map(str.isspace, text)) / size,
        0.0 if text.isascii() else sum(character > "\x7f" for character in text) / size,
        len(set(words)) / max(1, len(words)),
        float(text.rstrip().endswith("?")),
        float(text[:1].islower()),
        math.log1p(len(lines[-1])),
        math.log1p(len(lines[0])),
        math.log1p(len(sentences[0])),
        math.log1p(len(sentences[-1])),
    ]


def _asked(text: str, lower: str) -> list[float]:
    """The amount that the prompt requests, and the prompt's layout."""
    items, amount = _ASKED_ITEMS.search(lower), _ASKED_WORDS.search(lower)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    count = max(1, len(lines))
    number = 0
    if items is not None:
        number = _NUMBERS.get(items[1]) or int(items[1])
    return [
        math.log1p(number),
        math.log1p(int(amount[1])) if amount else 0.0,
        sum(" " not in line for line in lines) / count,
        text.count("?") / count,
        math.log1p(sum(line[:1].isdigit() or line[:1] in "-*•" for line in lines)),
        sum(map(len, lines[1:])) / max(1, len(text)),
    ]
