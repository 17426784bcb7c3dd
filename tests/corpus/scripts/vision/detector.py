"""Object detection: the model returns a dictionary of losses while it trains, and boxes while it does not."""

import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU())
        self.box, self.score = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1)

    def forward(self, images, targets=None):
        features = self.backbone(torch.stack(images))
        boxes, scores = self.box(features).mean((2, 3)), self.score(features).mean((2, 3))
        if not self.training:
            return [{"boxes": box, "labels": score.argmax()} for box, score in zip(boxes, scores, strict=True)]
        goal = torch.stack([target["boxes"][0] for target in targets])
        labels = torch.stack([target["labels"][0] for target in targets])
        return {
            "loss_box": nn.functional.smooth_l1_loss(boxes, goal),
            "loss_class": nn.functional.cross_entropy(scores, labels),
        }


model = Detector()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.005, momentum=0.9)
for _epoch in range(2):
    model.train()
    for _ in range(4):
        images = [torch.randn(3, 16, 16) for _ in range(2)]
        targets = [{"boxes": torch.rand(1, 4), "labels": torch.tensor([1])} for _ in range(2)]
        losses = sum(model(images, targets).values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model([torch.randn(3, 16, 16)])
