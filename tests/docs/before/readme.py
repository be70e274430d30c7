import torch

model = torch.nn.ModuleDict(
    {"embed": torch.nn.Embedding(4000, 64), "head": torch.nn.Linear(64, 64)}
)
state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
