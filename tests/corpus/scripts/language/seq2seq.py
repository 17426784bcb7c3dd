"""An encoder and a decoder with an optimizer each, teacher forcing word by word."""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True)

    def forward(self, words):
        return self.gru(self.embedding(words))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, word, hidden):
        output, hidden = self.gru(torch.relu(self.embedding(word)), hidden)
        return self.out(output[:, 0]), hidden


encoder, decoder, criterion = Encoder(), Decoder(), nn.CrossEntropyLoss()
encoder_optimizer = torch.optim.SGD(encoder.parameters(), lr=0.01)
decoder_optimizer = torch.optim.SGD(decoder.parameters(), lr=0.01)
for _ in range(6):
    source, target = torch.randint(0, 20, (4, 6)), torch.randint(0, 20, (4, 5))
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    _, hidden = encoder(source)
    word, loss = torch.zeros(4, 1, dtype=torch.long), 0.0
    for place in range(target.shape[1]):
        logits, hidden = decoder(word, hidden)
        loss = loss + criterion(logits, target[:, place])
        word = target[:, place, None]
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
