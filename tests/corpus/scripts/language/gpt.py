"""A small GPT: shared weights of embedding and head, parameter groups, accumulation, a sample now and then."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attn_in, self.attn_out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x):
        q, k, v = self.attn_in(self.ln_1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, tokens=40, size=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(tokens, size), nn.Embedding(12, size)
        self.h = nn.ModuleList(Block(size) for _ in range(2))
        self.lm_head = nn.Linear(size, tokens, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids, targets=None):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, ids, count):
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
for number in range(6):
    for _ in range(2):
        ids = torch.randint(0, 40, (4, 9))
        _, loss = model(ids[:, :-1], ids[:, 1:])
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if number == 3:
        model.eval()
        model.generate(torch.zeros(1, 1, dtype=torch.long), 3)
        model.train()
