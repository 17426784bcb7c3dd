"""Length prediction on the path of a request: the semantic cache, then the predictor, then the mean.

An error in a predictor or a cache does not stop a request: the exception is counted, and the request is taken for an
average one. In a queue with aging, such requests are served first come, first served among themselves.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from joulery.domain.arrays import FloatArray
from joulery.domain.serving.generation import GenerationRequest, TokenUsage
from joulery.perf.lengths.classes import rounded_class
from joulery.perf.lengths.pace import OnlineLengths, OnlinePace, limited_tokens, unlimited_tokens
from joulery.perf.lengths.prompt_templates import Form, TemplateLengths, prompt_template
from joulery.perf.lengths.remaining import RatioCalibration
from joulery.store.semantic_cache import SemanticCache

CACHE, PREDICTOR, MEAN = "cache", "predictor", "mean"
_RATIOS, _FEW_RATIOS = 200, 20
"""Answers kept to measure how far they exceed their predictions, and the fewest that suffice."""
_UPPER_QUANTILE, _UPPER_RATIO = 0.9, 1.5
"""The quantile a clock governor plans for, and the factor on the prediction until it is known."""
_CHARACTERS_PER_TOKEN = 4
"""A rough length of a token of English."""
LONGEST_REMEMBERED = 8_000
"""Characters of the longest prompt that is kept in the cache: memory is for prompts that come again."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthScore:
    """Output of a predictor for a prompt.

    Attributes:
        score: Raw ordinal score, about 0 (short) to 4 (long).
        embedding: Semantic embedding of the prompt, for the cache; None from a predictor without one.
    """

    score: float
    embedding: FloatArray | None = None


class LengthPredictor(Protocol):
    """A length predictor with one model's head chosen."""

    @property
    def class_tokens(self) -> FloatArray:
        """Mean tokens of the five classes, ascending, float64[5]."""
        ...

    def predict(self, prompt: str) -> LengthScore:
        """Score a prompt; any exception counts as a failure of the predictor."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Forecast for one request.

    Attributes:
        tokens: Expected length, within the client's limit.
        service_s: Expected seconds in the engine, the prompt's reading included.
        source: ``cache``, ``predictor`` or ``mean``.
        unlimited_tokens: Expected length if the client set no limit.
        scored: The score of the predictor; None where there is no predictor, or it failed.
        form: Template of the prompt, where there is a score.
    """

    tokens: float
    service_s: float
    source: str
    unlimited_tokens: float
    scored: LengthScore | None = None
    form: Form | None = None


class Forecaster:
    """Forecasts the requests of one model, and learns from their answers.

    Args:
        model: Its name.
        predictor: The predictor; None to take every request for an average one.
        cache: Stores the lengths of answers; None for no cache.
        pace: Estimate of the engine's speed.

    Attributes:
        sources: How often each source answered.
        failures: How often the predictor or the cache raised, by the exception's name.
    """

    def __init__(
        self,
        model: str,
        predictor: LengthPredictor | None = None,
        cache: SemanticCache | None = None,
        pace: OnlinePace | None = None,
    ) -> None:
        self.model, self.predictor, self.cache = model, predictor, cache
        self.pace = pace or OnlinePace()
        self.sources: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._lengths = None if predictor is None else OnlineLengths(predictor.class_tokens)
        self._forms = TemplateLengths()
        self._ratios: deque[float] = deque(maxlen=_RATIOS)
        self._calibration = RatioCalibration()
        self._mean = 150.0 if predictor is None else float(np.mean(predictor.class_tokens))

    def load(self) -> None:
        """Load everything that the predictor needs, so that the first requests do not wait for it."""
        if self.predictor is not None:
            with suppress(Exception):  # the first request shows it
                self.predictor.predict("Tell me a story.")

    @property
    def average_s(self) -> float:
        """Seconds that an average answer is expected to take."""
        return self.pace.service_s(self._mean)

    @property
    def upper_ratio(self) -> float:
        """Factor on predicted lengths that nine in ten of the latest answers stayed below."""
        return _UPPER_RATIO if len(self._ratios) < _FEW_RATIOS else float(np.quantile(self._ratios, _UPPER_QUANTILE))

    def forecast(self, request: GenerationRequest) -> Forecast:
        """Forecast a request; exceptions of the predictor and the cache are counted, not raised."""
        tokens, source, scored, form = self._mean, MEAN, None, None
        if self.predictor is not None and self._lengths is not None:
            # A predictor may be a user's model: an exception in it must not fail the request.
            try:
                scored = self.predictor.predict(request.prompt)
                if not math.isfinite(scored.score):
                    raise ArithmeticError(f"a score of {scored.score}")
                tokens, source = self._lengths.expected(scored.score), PREDICTOR
            except Exception as error:  # noqa: BLE001 - counted and shown; the request goes on without
                self._failed(error)
                scored = None
        if scored is not None and self._lengths is not None:
            form = prompt_template(request.prompt)
            tokens *= self._forms.ratio(form, self._lengths)
        known = self._remembered(request, scored)
        if known is not None:
            tokens, source = known, CACHE
        self.sources[source] += 1
        within = _within(tokens, request.max_tokens, exact=known is not None)
        return Forecast(within, self.pace.service_s(within, prompt_tokens(request)), source, tokens, scored, form)

    def remaining_s(self, request: GenerationRequest, forecast: Forecast, written: int, *, started: bool) -> float:
        """Seconds that an answer with ``written`` tokens so far is still expected to take.

        The estimate uses how far earlier answers with such predictions went, and the prediction as corrected by later
        answers.
        """
        ratios, likely = self._calibration.ratios(_kind(forecast)), max(self._likely(forecast), 1e-3)
        limit = None if request.max_tokens is None else request.max_tokens / likely
        tokens_s = self.pace.per_token_s * likely * ratios.remaining(written / likely, limit)
        return tokens_s if started else tokens_s + self.pace.service_s(0.0, prompt_tokens(request))

    def _likely(self, forecast: Forecast) -> float:
        """The length that would be predicted now, without the client's limit."""
        if forecast.source != PREDICTOR or forecast.scored is None or forecast.form is None or self._lengths is None:
            return forecast.unlimited_tokens
        return self._lengths.expected(forecast.scored.score) * self._forms.ratio(forecast.form, self._lengths)

    def completed(
        self, request: GenerationRequest, forecast: Forecast, usage: TokenUsage, service_s: float | None
    ) -> None:
        """Learn from an answer; from its seconds in the engine where those are known.

        An answer cut at the client's limit would have been longer: it shows how fast the engine is, and only raises the
        expected lengths.
        """
        if service_s is not None:
            self.pace.completed(usage.completion, service_s, prompt_tokens(request))
        tokens = float(usage.completion)
        cut = request.max_tokens is not None and usage.completion >= request.max_tokens
        self._calibration.completed(_kind(forecast), forecast.unlimited_tokens, tokens, cut=cut)
        if cut:
            self._cut(request, forecast, tokens)
            return
        if forecast.tokens > 0:
            self._ratios.append(tokens / forecast.tokens)
        self._mean += 0.02 * (tokens - self._mean)
        if forecast.scored is not None and forecast.form is not None and self._lengths is not None:
            self._forms.completed(forecast.form, forecast.scored.score, tokens)
            self._lengths.completed(forecast.scored.score, tokens)
        self._remember(request, forecast, tokens)

    def _cut(self, request: GenerationRequest, forecast: Forecast, tokens: float) -> None:
        """Learn from an answer that was cut at the client's limit and would have been longer."""
        self._mean += 0.02 * max(0.0, unlimited_tokens(self._mean, tokens) - self._mean)
        likely = unlimited_tokens(forecast.unlimited_tokens, tokens)
        if forecast.scored is not None and forecast.form is not None and self._lengths is not None:
            score = forecast.scored.score
            if likely > forecast.unlimited_tokens:
                self._forms.completed(forecast.form, score, likely)
            if likely > self._lengths.expected(score):
                self._lengths.completed(score, likely)
        if forecast.source != CACHE or forecast.unlimited_tokens <= tokens:
            self._remember(request, forecast, tokens + forecast.unlimited_tokens)

    def _remembered(self, request: GenerationRequest, scored: LengthScore | None) -> float | None:
        if self.cache is None or len(request.prompt) > LONGEST_REMEMBERED:
            return None
        try:
            return self.cache.look_up(self.model, request.prompt, _embedding(scored))
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
            return None

    def _remember(self, request: GenerationRequest, forecast: Forecast, tokens: float) -> None:
        if self.cache is None or len(request.prompt) > LONGEST_REMEMBERED:
            return
        if forecast.scored is None and self.predictor is not None:
            return  # the predictor failed: what the prompt means is not known
        try:
            self.cache.insert(self.model, request.prompt, _embedding(forecast.scored), tokens)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.failures[type(error).__name__] += 1


def prompt_tokens(request: GenerationRequest) -> int:
    """Approximate tokens of a prompt: engines report the count only once they have read it."""
    return 1 + len(request.prompt) // _CHARACTERS_PER_TOKEN


def _within(tokens: float, max_tokens: int | None, *, exact: bool) -> float:
    """Expected length under the client's limit, from an expected or exactly known length without that limit."""
    if max_tokens is None:
        return tokens
    return min(tokens, float(max_tokens)) if exact else limited_tokens(tokens, float(max_tokens))


def _kind(forecast: Forecast) -> tuple[str, int]:
    """Key of predictions that have similar errors: their source and class."""
    score = 0.0 if forecast.scored is None else forecast.scored.score
    return (forecast.source, int(rounded_class(score)) if forecast.source == PREDICTOR else 0)


def _embedding(scored: LengthScore | None) -> FloatArray:
    """The embedding, or a zero vector, which matches only equal text."""
    if scored is None or scored.embedding is None:
        return np.zeros(1)
    return scored.embedding
