"""A recurrent language model with truncated backpropagation and clipped gradients."""

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, tokens, size):
        super().__init__()
        self.encoder = nn.Embedding(tokens, size)
        self.rnn = nn.LSTM(size, size)
        self.decoder = nn.Linear(size, tokens)

    def forward(self, batch, hidden):
        output, hidden = self.rnn(self.encoder(batch), hidden)
        return self.decoder(output).view(-1, self.decoder.out_features), hidden


model, criterion = RNNModel(50, 16), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
corpus = torch.randint(0, 50, (41, 4))
hidden = None
for start in range(0, 40, 5):
    data, targets = corpus[start : start + 5], corpus[start + 1 : start + 6].reshape(-1)
    if hidden is not None:
        hidden = tuple(state.detach() for state in hidden)
    model.zero_grad()
    output, hidden = model(data, hidden)
    loss = criterion(output, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
