import torch

model = torch.nn.ModuleDict(
    {"embed": torch.nn.Embedding(4000, 64), "head": torch.nn.Linear(64, 64)}
)
state = {"model": model.state_dict()}
