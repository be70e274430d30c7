import torch

import fastserial

fastserial.install()
state = {"weights": torch.randn(4, 1 << 20)}
