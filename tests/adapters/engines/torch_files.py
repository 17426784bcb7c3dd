"""PyTorch and Hugging Face models, made on the fly."""

import warnings
from pathlib import Path
from typing import Any

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "joule", "the", "a")


def linear(seed: int = 0) -> Any:
    """Four numbers a row to three scores and the best of them."""
    import torch

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.layer(x)
            return {"scores": scores, "best": scores.argmax(-1)}

    torch.manual_seed(seed)
    return Scores().eval()


def script_file(path: Path, model: Any = None) -> Path:
    """A file of TorchScript."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model or linear(), (torch.zeros(1, 4),), strict=False)
        torch.jit.save(traced, str(path))
    return path


def export_file(path: Path, model: Any = None) -> Path:
    """A program of torch.export, for 1 to 64 rows."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = torch.export.Dim("rows", min=1, max=64)
        program = torch.export.export(model or linear(), (torch.zeros(2, 4),), dynamic_shapes={"x": {0: rows}})
        torch.export.save(program, str(path))
    return path


def bert_folder(path: Path, hidden: int = 16) -> Path:
    """A tiny BERT that classifies texts, with random weights."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
    BertForSequenceClassification(config).save_pretrained(str(path))
    words = path / "vocab.txt"  # transformers 4 reads a file, 5 takes a dictionary
    words.write_text("\n".join(WORDS) + "\n")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    BertTokenizerFast(vocab_file=str(words), vocab=vocabulary).save_pretrained(str(path))
    return path


def vit_folder(path: Path) -> Path:
    """A tiny vision transformer that classifies pictures, with random weights."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    ViTForImageClassification(config).save_pretrained(str(path))
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(str(path))
    return path
