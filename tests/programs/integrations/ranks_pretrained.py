"""A rank: saves a Llama under FSDP2 and tensor parallelism; rank 0 loads it by `from_pretrained`.

Arguments: folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fastserial import distributed

PLAN = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
}


def model_of(tied: bool) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=997,
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    rank, count = join()
    folder = Path(sys.argv[1])
    mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
    for tied in (False, True):
        model = model_of(tied)
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], {name: kind() for name, kind in PLAN.items()})
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        target, theirs = folder / f"ours {tied}", folder / f"theirs {tied}"
        distributed.save(model, target, format="safetensors", shard_nbytes=300_000, timeout=60)
        if rank == 0:
            whole = model_of(tied)
            whole.config.save_pretrained(target)
            whole.save_pretrained(theirs, max_shard_size=300_000)
            names = sorted(path.name for path in theirs.glob("*.safetensors"))
            assert len(names) > 2
            assert sorted(path.name for path in target.glob("*.safetensors")) == names
            for name in (*names, "model.safetensors.index.json"):
                assert (target / name).read_bytes() == (theirs / name).read_bytes(), name
            loaded = AutoModelForCausalLM.from_pretrained(target)
            tokens = torch.arange(24).reshape(2, 12) * 7
            assert torch.equal(loaded(tokens).logits, whole(tokens).logits)
        dist.barrier()
        wanted = {name: part.to_local().clone() for name, part in model.named_parameters()}
        with torch.no_grad():
            for part in model.parameters():
                part.to_local().zero_()
        distributed.load(theirs, model, timeout=60)
        for name, part in model.named_parameters():
            assert torch.equal(part.to_local(), wanted[name]), name
        dist.barrier()
    print("ok")


if __name__ == "__main__":
    main()
