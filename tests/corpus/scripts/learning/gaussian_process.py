"""Exact regression by a Gaussian process, in the style of GPyTorch, whose modules call ``forward`` without hooks."""

import torch
from torch import nn


class Module(nn.Module):
    def __call__(self, *inputs):
        return self.forward(*inputs)


class ConstantMean(Module):
    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.constant.expand(x.shape[0])


class DeepKernel(Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(4, 8)
        self.raw_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        z = self.features(x)
        square = z.square().sum(-1)
        return nn.functional.softplus(self.raw_scale) * torch.exp(z @ z.T - (square[:, None] + square) / 2)


class ExactGP(Module):
    def __init__(self):
        super().__init__()
        self.mean_module, self.covar_module = ConstantMean(), DeepKernel()

    def forward(self, x):
        return self.mean_module(x), self.covar_module(x)


class MarginalLogLikelihood(Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.raw_noise = nn.Parameter(torch.zeros(()))

    def forward(self, prediction, y):
        mean, covar = prediction
        covar = covar + (nn.functional.softplus(self.raw_noise) + 1e-3) * torch.eye(len(y))
        return torch.distributions.MultivariateNormal(mean, covar).log_prob(y) / len(y)


x = torch.rand(40, 4)
y = torch.sin(x.sum(-1)) + 0.1 * torch.randn(40)
model = ExactGP()
mll = MarginalLogLikelihood(model)
optimizer = torch.optim.Adam(mll.parameters(), lr=0.05)
for _ in range(8):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad():
    mean, covar = model(torch.rand(10, 4))
