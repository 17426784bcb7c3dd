"""Low-rank adapters on a frozen model."""

import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


model = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2, enable_nested_tensor=False
)
model.requires_grad_(False)
for layer in model.layers:
    layer.linear1, layer.linear2 = LoRALinear(layer.linear1), LoRALinear(layer.linear2)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
for _ in range(6):
    batch = torch.randn(4, 5, 16)
    loss = nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
