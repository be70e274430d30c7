import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(512, 512)
fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 512)).sum().backward()
optimizer.step()
step = 1000
