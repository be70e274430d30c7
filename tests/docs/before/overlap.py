import os

import torch
import torch.distributed as dist

import fastserial

dist.init_process_group(
    "gloo", init_method=f"file://{os.path.abspath('ranks')}", rank=0, world_size=1
)
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
steps = 2
obj = {"model": model.state_dict()}
path = "ranks.pt"
model(torch.randn(2, 512)).sum().backward()
