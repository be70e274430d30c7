import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model.state_dict(), "step": 1}
