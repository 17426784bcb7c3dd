"""Pre-train a BERT or an ALBERT for some steps, on random tokens and from random weights: a program to be measured.

    joulery measure --trace torch -- python examples/anatomy/pretrain.py --layers 4 --hidden 256

Nothing in here knows of joulery. Needs torch and transformers.
"""

import argparse

import torch
from transformers import AlbertConfig, AlbertForPreTraining, BertConfig, BertForPreTraining

VOCABULARY = 30_522


def model_of(arguments: argparse.Namespace) -> torch.nn.Module:
    sizes = {
        "num_hidden_layers": arguments.layers,
        "hidden_size": arguments.hidden,
        "num_attention_heads": max(1, arguments.hidden // 64),
        "intermediate_size": 4 * arguments.hidden,
        "vocab_size": VOCABULARY,
    }
    if arguments.model == "albert":
        config = AlbertConfig(**sizes, embedding_size=128)
        return AlbertForPreTraining._from_config(config, attn_implementation=arguments.attention)
    return BertForPreTraining._from_config(BertConfig(**sizes), attn_implementation=arguments.attention)


def train(model: torch.nn.Module, arguments: argparse.Namespace) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    shape = (arguments.batch, arguments.tokens)
    for _ in range(arguments.steps):
        tokens, labels = (torch.randint(0, VOCABULARY, shape) for _ in range(2))
        following = torch.randint(0, 2, (arguments.batch,))
        order = {"next_sentence_label": following} if arguments.model == "bert" else {"sentence_order_label": following}
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels, **order).loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["bert", "albert"], default="bert")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    train(model_of(chosen), chosen)
