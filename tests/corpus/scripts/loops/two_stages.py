"""An autoencoder is trained first, then a classifier on its encoder; both optimizers live to the end."""

import torch
from torch import nn
from torch.nn import functional as F

encoder, decoder = nn.Sequential(nn.Linear(32, 16), nn.ReLU()), nn.Linear(16, 32)
autoencoder = nn.Sequential(encoder, decoder)
pretraining = torch.optim.Adam(autoencoder.parameters())
for _ in range(6):
    x = torch.rand(8, 32)
    pretraining.zero_grad()
    F.mse_loss(autoencoder(x), x).backward()
    pretraining.step()

classifier = nn.Sequential(encoder, nn.Linear(16, 4))
finetuning = torch.optim.SGD(classifier.parameters(), lr=0.1)
for _ in range(12):
    finetuning.zero_grad()
    F.cross_entropy(classifier(torch.rand(8, 32)), torch.randint(0, 4, (8,))).backward()
    finetuning.step()
