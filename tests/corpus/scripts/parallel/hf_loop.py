"""A Hugging Face model fine-tuned in a plain loop with a schedule of the learning rate."""

import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

config = BertConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=60, num_labels=2
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
scheduler = get_linear_schedule_with_warmup(optimizer, 1, 6)
model.train()
for _ in range(6):
    batch = {"input_ids": torch.randint(0, 60, (4, 8)), "labels": torch.randint(0, 2, (4,))}
    outputs = model(**batch)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
model.eval()
for _ in range(3):
    with torch.no_grad():
        model(input_ids=torch.randint(0, 60, (4, 8))).logits.argmax(dim=-1)
