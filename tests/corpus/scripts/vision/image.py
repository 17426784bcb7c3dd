"""A small image classifier, two epochs, an evaluation after each."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(torch.flatten(self.dropout(x), 1)), dim=1)


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    with torch.no_grad():
        for data, _ in loader:
            model(data).argmax(dim=1)


torch.manual_seed(1)
images = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,)))
model = Net()
optimizer = torch.optim.Adadelta(model.parameters())
for _ in range(2):
    train(model, DataLoader(images, batch_size=8, shuffle=True), optimizer)
    test(model, DataLoader(images, batch_size=16))
