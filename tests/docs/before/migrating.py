import os

import torch

import fastserial

path = os.path.abspath("ckpt.pt")
model = torch.nn.Linear(4, 4)
state = {"model": model.state_dict()}
