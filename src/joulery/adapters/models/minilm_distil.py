"""Distillation of the prompt encoder into fewer layers with PyTorch, which only this training needs.

The student keeps the first layers of all-MiniLM-L6-v2 and is tuned end to end. For each prompt it learns the output of
the deeper encoder (the mean of its tokens) and of a predictor trained on that output (one head for each model, one for
their mean, one for the class of the mean); for pieces of prompts, only the output of the deeper encoder. The targets of
the heads are from fits without the prompt, so the student's output is no better on a training prompt than on a new one,
and a later fit can rely on it. First phase of μ-Serve's training (ATC'24, section 3.3); the second, with the encoder
frozen, is the kernel ridge of :mod:`joulery.perf.lengths.kernel_ridge`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from joulery.adapters.models.minilm import WIDTH, PromptEncoder, Weights
from joulery.domain.arrays import FloatArray, IntArray
from joulery.domain.errors import CapabilityError, ConfigError

HOW = "pip install 'joulery[torch]'"
_ATTENTION_HEADS = 12
_SHORTEST_PIECE = 4
_CLASS_RATIO = 0.3


@dataclass(frozen=True, slots=True)
class DistilRecipe:
    """Training settings of a student model.

    Attributes:
        layers: Layers of the student.
        epochs: Passes over all prompts.
        pieces: Additional pieces of each prompt, drawn again in each epoch.
        batch: Texts in a step.
        encoder_rate, head_rate: Highest learning rates; they rise over a tenth of the steps and fall linearly.
        heads_ratio: Weight of the heads' loss beside the encoder's.
        seed: Seed of all random draws.
    """

    layers: int = 3
    epochs: int = 5
    pieces: int = 2
    batch: int = 24
    encoder_rate: float = 2e-4
    head_rate: float = 1e-3
    heads_ratio: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if not (1 <= self.layers <= 6 and self.epochs >= 1 and self.pieces >= 0 and self.batch >= 2):
            raise ConfigError("distilling needs 1 to 6 layers, an epoch and a batch of two at least")


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """Training data of a student.

    Attributes:
        prompts: Texts of the prompts.
        scores: Score of each head for each prompt, from fits without it, float64[prompts, heads]; the mean head last.
        classes: Class of the mean head's score, 0 to 4, int64[prompts].
    """

    prompts: Sequence[str]
    scores: FloatArray
    classes: IntArray


Progress = Callable[[int, int, str], None]
"""Receives the steps done, the steps in all and, after an epoch, its loss."""


def distil(
    teacher: PromptEncoder, lesson: Lesson, recipe: DistilRecipe | None = None, progress: Progress | None = None
) -> PromptEncoder:
    """Train an encoder of fewer layers to reproduce a deeper one; equal seeds give equal encoders on one machine.

    One thread of one CPU: 515 prompts take one to two minutes and half a gigabyte.

    Args:
        teacher: The deeper encoder.
        lesson: Prompts and a predictor's scores of them.
        recipe: Training settings; the defaults when None.
        progress: Called after every step and every epoch.

    Raises:
        CapabilityError: PyTorch is not installed.
    """
    recipe = recipe or DistilRecipe()
    try:
        import torch
    except ImportError:
        raise CapabilityError("distilling needs PyTorch, which is not installed", resource="torch", grant=HOW) from None
    threads = torch.get_num_threads()
    # Small steps lose more to waiting for one another than two threads gain.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            tuned = _Student(teacher, lesson, recipe).trained_weights(progress or _silent)
    finally:
        torch.set_num_threads(threads)
    return PromptEncoder(recipe.layers, teacher.max_tokens, teacher.last_tokens, tuned)


def _silent(done: int, of: int, what: str) -> None:
    """Reports no progress."""


class _Student:
    """The parameters in training, their optimiser and their targets."""

    def __init__(self, teacher: PromptEncoder, lesson: Lesson, recipe: DistilRecipe) -> None:
        import torch

        self._teacher, self._recipe = teacher, recipe
        self._draws = np.random.default_rng(recipe.seed)
        self._tokens = [teacher.pieces(prompt) for prompt in lesson.prompts]
        teacher_vectors = np.array([teacher.of_tokens(tokens) for tokens in self._tokens])
        self._teacher_vectors = teacher_vectors
        self._shift, self._scale = teacher_vectors.mean(0), 1.0 / np.maximum(teacher_vectors.std(0), 1e-6)
        self._scores = torch.tensor(np.ascontiguousarray(lesson.scores), dtype=torch.float32)
        self._classes = torch.tensor(np.ascontiguousarray(lesson.classes), dtype=torch.int64)
        self.parameters = _parameters(teacher.weights, recipe.layers)
        # Words too rare to be met again keep the meaning they have.
        tuned = [value for name, value in self.parameters.items() if "_embeddings." not in name]
        outputs = lesson.scores.shape[1] + int(np.max(lesson.classes, initial=0)) + 1
        self._heads = torch.zeros(outputs, WIDTH)
        self._bias = torch.zeros(outputs)
        for value in (*tuned, self._heads, self._bias):
            value.requires_grad_(True)
        self._tuned = tuned
        groups = [
            {"params": tuned, "lr": recipe.encoder_rate},
            {"params": [self._heads, self._bias], "lr": recipe.head_rate},
        ]
        self._optimiser = torch.optim.AdamW(groups, weight_decay=0.01)

    def trained_weights(self, progress: Progress) -> Weights:
        """Train for all epochs, and return the weights by name."""
        recipe, count = self._recipe, len(self._tokens) * (1 + self._recipe.pieces)
        steps, done = recipe.epochs * -(-count // recipe.batch), 0
        for epoch in range(recipe.epochs):
            losses = []
            tokens, teacher_vectors, owners = self._material()
            for rows in _batches([len(each) for each in tokens], recipe.batch, self._draws):
                self._rates(done, steps)
                losses.append(self._step([tokens[row] for row in rows], teacher_vectors[rows], owners[rows]))
                done += 1
                progress(done, steps, "")
            progress(done, steps, f"epoch {epoch + 1} of {recipe.epochs}, loss {np.mean(losses):.3f}")
        return {name: value.detach().numpy() for name, value in self.parameters.items()}

    def _material(self) -> tuple[list[list[int]], FloatArray, IntArray]:
        """The tokens of all prompts and of new pieces, the teacher's outputs, and their rows of scores; -1 for none."""
        pieces = [_piece(tokens, self._draws) for tokens in self._tokens for _ in range(self._recipe.pieces)]
        teacher_vectors = [self._teacher.of_tokens(piece) for piece in pieces]
        owners = np.concatenate([np.arange(len(self._tokens)), np.full(len(pieces), -1)])
        return [*self._tokens, *pieces], np.array([*self._teacher_vectors, *teacher_vectors]), owners

    def _rates(self, done: int, steps: int) -> None:
        share = min((done + 1) / max(1.0, 0.1 * steps), (steps - done) / steps)
        for group, rate in zip(
            self._optimiser.param_groups, (self._recipe.encoder_rate, self._recipe.head_rate), strict=True
        ):
            group["lr"] = rate * share

    def _step(self, tokens: list[list[int]], teacher_vectors: FloatArray, owners: IntArray) -> float:
        import torch

        scale = torch.tensor(self._scale, dtype=torch.float32)
        found = (_meaning(self.parameters, tokens, self._recipe.layers) - torch.tensor(self._shift).float()) * scale
        loss = torch.mean((found - torch.tensor((teacher_vectors - self._shift) * self._scale).float()) ** 2)
        whole = torch.tensor(np.flatnonzero(owners >= 0))
        if len(whole) and self._recipe.heads_ratio:
            outputs = found[whole] @ self._heads.T + self._bias
            scores, chosen = self._scores[owners[owners >= 0]], self._classes[owners[owners >= 0]]
            heads = scores.shape[1]
            errors = torch.mean((outputs[:, :heads] - scores) ** 2, 0)
            task_loss = errors[:-1].mean() + errors[-1]
            task_loss = task_loss + _CLASS_RATIO * torch.nn.functional.cross_entropy(outputs[:, heads:], chosen)
            loss = loss + self._recipe.heads_ratio * task_loss
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._tuned, 1.0)
        self._optimiser.step()
        return float(loss.detach())


def _parameters(weights: Weights, layers: int) -> dict[str, Any]:
    """Copies of the weights of the embeddings and of the first ``layers`` layers."""
    import torch

    kept = {}
    for name, value in weights.items():
        deep = name.startswith("encoder.layer.") and int(name.split(".")[2]) >= layers
        if name.startswith(("encoder.layer.", "embeddings.")) and not deep:
            kept[name] = torch.tensor(np.array(value), dtype=torch.float32)
    return kept


def _meaning(parameters: dict[str, Any], tokens: list[list[int]], layers: int) -> Any:
    """The mean of each text's tokens after all layers, float32[texts, 384], differentiable."""
    import torch
    from torch.nn import functional

    longest = max(map(len, tokens))
    numbers = torch.tensor([[*each, *[0] * (longest - len(each))] for each in tokens])
    there = torch.tensor([[True] * len(each) + [False] * (longest - len(each)) for each in tokens])

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, (WIDTH,), parameters[f"{name}.weight"], parameters[f"{name}.bias"], 1e-12)

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])

    def split(x: Any) -> Any:
        return x.view(len(tokens), longest, _ATTENTION_HEADS, -1).transpose(1, 2)

    words = functional.embedding(numbers, parameters["embeddings.word_embeddings.weight"])
    places = parameters["embeddings.position_embeddings.weight"][:longest]
    x = norm(words + places + parameters["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for number in range(layers):
        name = f"encoder.layer.{number}"
        query, key, value = (split(linear(x, f"{name}.attention.self.{part}")) for part in ("query", "key", "value"))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None, :])
        joined = linear(mixed.transpose(1, 2).reshape(x.shape), f"{name}.attention.output.dense")
        x = norm(x + joined, f"{name}.attention.output.LayerNorm")
        wide = functional.gelu(linear(x, f"{name}.intermediate.dense"))
        x = norm(x + linear(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    mask = there[..., None].float()
    return (x * mask).sum(1) / mask.sum(1)


def _piece(tokens: list[int], draws: np.random.Generator) -> list[int]:
    """A random run of a prompt's tokens, with its opening and closing tokens; half of the runs begin at its start."""
    body = tokens[1:-1]
    size = max(min(_SHORTEST_PIECE, len(body)), round(len(body) * draws.uniform(0.3, 1.0)))
    start = 0 if draws.random() < 0.5 else int(draws.integers(0, len(body) - size + 1))
    return [tokens[0], *body[start : start + size], tokens[-1]]


def _batches(sizes: Sequence[int], batch: int, draws: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """Batches of texts of similar size, in random order, so that little padding is needed."""
    order = np.argsort(np.array(sizes) * draws.uniform(0.8, 1.25, len(sizes)), kind="stable")
    found = [order[low : low + batch] for low in range(0, len(order), batch)]
    return [found[place] for place in draws.permutation(len(found))]
