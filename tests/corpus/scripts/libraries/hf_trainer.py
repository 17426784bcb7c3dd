"""The Trainer of Hugging Face, with accumulation and an evaluation at the end."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"input_ids": torch.randint(0, 60, (8,)), "labels": torch.tensor(index % 2)}


config = BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=60, num_labels=2
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=4, per_device_eval_batch_size=8, use_cpu=True,
        gradient_accumulation_steps=2, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        BertForSequenceClassification(config), arguments, train_dataset=Sentences(), eval_dataset=Sentences()
    )
    trainer.train()
    trainer.evaluate()
