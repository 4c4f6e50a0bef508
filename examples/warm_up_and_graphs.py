"""Warm-up, and decode steps in a CUDA graph whose lengths and pages change between replays.

A server that must not compile while it serves runs ``python -m hopwell compile`` once, sets ``HOPWELL_JIT=forbid``, and
makes one call of each form at its start. Without a GPU the same steps run on the emulator, one call after the other.
"""

import logging

import torch

import hopwell

logging.basicConfig(format="%(message)s")
logging.getLogger("hopwell").setLevel(logging.INFO)  # says when a kernel is compiled

device = "cuda" if torch.cuda.is_available() else "cpu"
batch, heads, kv_heads, head_dim, page_size, pages_each = 4, 8, 2, 128, 16, 6
capacity = page_size * pages_each  # keys that a request can have

# Everything that a graph reads stays where it is; its contents change between replays.
kv_cache = torch.randn(batch * pages_each, 2, kv_heads, page_size, head_dim, device=device).bfloat16()
query = torch.empty(batch, heads, head_dim, dtype=torch.bfloat16, device=device)
out = torch.empty_like(query)
block_tables = torch.arange(batch * pages_each, dtype=torch.int32, device=device).view(batch, pages_each)
seq_lens = torch.ones(batch, dtype=torch.int32, device=device)
workspace_bytes = hopwell.decode.xqa_workspace_bytes(heads, kv_heads, head_dim, capacity, device=device)
workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)


def attend():
    """Decode into ``out``. The bounds belong to the longest possible request, so they never change."""
    hopwell.xqa_batch_decode_with_kv_cache(
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=capacity,
        bmm1_scale=head_dim**-0.5,
        kv_layout="HND",
        out=out,
    )


# Warm-up: the first call checks its arguments and compiles or loads the kernel; later ones only launch it.
query.normal_()
attend()
print(f"warm-up done: {batch} requests of up to {capacity} tokens each")

if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    step, how = graph.replay, "a replay of the CUDA graph"
else:
    step, how = attend, "a call on the emulator, as there is no GPU for a CUDA graph"

steps = []
for lengths in ([5, 40, 17, 96], [96, 1, 33, 64]):
    query.normal_()
    seq_lens.copy_(torch.tensor(lengths))
    block_tables.copy_(torch.randperm(batch * pages_each).view(batch, pages_each))
    step()
    print(f"decode step by {how}, with {lengths} tokens: largest output {out.abs().max():.3f}")
    steps.append((query.clone(), block_tables.clone(), lengths, out.clone()))
