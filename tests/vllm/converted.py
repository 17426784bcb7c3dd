"""Writes a GGUF file of the llama architecture as a Hugging Face model, which vLLM loads.

``python converted.py FILE.gguf FOLDER``, in vLLM's environment with ``gguf`` beside it. Weights are dequantised to
bfloat16; queries and keys get back the order of rows that llama.cpp permutes for its rotary embedding.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def weights(reader: Any, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Every tensor under its Hugging Face name."""
    found = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in heads:
                pairs = values.reshape(heads[part], values.shape[0] // heads[part] // 2, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            name = f"model.layers.{layer}.{LAYER[part]}"
        else:
            name = TOP[name]
        found[f"{name}.weight"] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return found


def convert(file: Path, folder: Path) -> None:
    """Write the model, its configuration and its tokenizer."""
    reader = GGUFReader(file)

    def known(name: str) -> Any:
        return reader.fields[name].contents()

    heads = {"attn_q": known("llama.attention.head_count"), "attn_k": known("llama.attention.head_count_kv")}
    tensors = weights(reader, heads)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": known("llama.embedding_length"),
        "num_hidden_layers": known("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "intermediate_size": known("llama.feed_forward_length"),
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": known("llama.context_length"),
        "rms_norm_eps": known("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": known("llama.rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "hidden_act": "silu",
        "bos_token_id": known("tokenizer.ggml.bos_token_id"),
        "eos_token_id": known("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
