"""Prefill and a few decode steps over one paged cache. Tensors on the CPU run on the emulator."""

import logging

import torch

import hopwell

logging.basicConfig(format="%(message)s")
logging.getLogger("hopwell").setLevel(logging.INFO)  # says when a kernel is compiled, which the first call does

device = "cuda" if torch.cuda.is_available() else "cpu"
heads, kv_heads, head_dim, page_size = 4, 2, 128, 16

q_lens, kv_lens = [5, 1, 40], [37, 64, 40]  # new tokens, and all tokens, of each request
query = torch.randn(sum(q_lens), heads, head_dim, dtype=torch.bfloat16, device=device)
kv_cache = torch.randn(20, 2, kv_heads, page_size, head_dim, dtype=torch.bfloat16, device=device)  # HND, K then V
page_ids = [[7, 2, 11, -1, -1], [0, 19, 4, 9, 15], [5, 13, 6, -1, -1]]
block_tables = torch.tensor(page_ids, dtype=torch.int32, device=device)
seq_lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)

out = hopwell.trtllm_batch_context_with_kv_cache(
    query=query,
    kv_cache=kv_cache,
    workspace_buffer=torch.empty(0, device=device),  # FlashInfer needs one here, hopwell does not
    block_tables=block_tables,
    seq_lens=seq_lens,
    max_q_len=max(q_lens),
    max_kv_len=max(kv_lens),
    bmm1_scale=head_dim**-0.5,
    bmm2_scale=1.0,
    batch_size=len(q_lens),
    cum_seq_lens_q=torch.tensor([0, 5, 6, 46], dtype=torch.int32, device=device),
    cum_seq_lens_kv=torch.tensor([0, 37, 101, 141], dtype=torch.int32, device=device),
)

place = "the GPU" if device == "cuda" else "the CPU, emulated"
print(
    f"prefill on {place}: {sum(q_lens)} new tokens of {len(q_lens)} requests attended to {sum(kv_lens)} cached tokens"
)

prefilled = query, out  # the next steps have queries and outputs of their own

# The workspace holds partial results of requests whose keys several multiprocessors share; its size does not depend on
# the batch.
capacity = page_size * block_tables.shape[1]  # tokens
workspace_bytes = hopwell.decode.xqa_workspace_bytes(heads, kv_heads, head_dim, capacity)
workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)


def attend(request=slice(None)):
    return hopwell.xqa_batch_decode_with_kv_cache(
        query=query[request],
        kv_cache=kv_cache,
        workspace_buffer=workspace,
        block_tables=block_tables[request],
        seq_lens=seq_lens[request],
        max_seq_len=capacity,
        bmm1_scale=head_dim**-0.5,
        kv_layout="HND",
    )


requests = torch.arange(3, dtype=torch.int32, device=device)  # which one each new token belongs to
for step in range(3):
    query, key, value = (torch.randn(3, n, head_dim, device=device).bfloat16() for n in (heads, kv_heads, kv_heads))
    hopwell.append_paged_kv_cache(key, value, requests, seq_lens, kv_cache, kv_layout="HND", block_tables=block_tables)
    seq_lens += 1
    out = attend()
    print(f"decode step {step}: one token more for each request, which now have {seq_lens.tolist()} tokens")

# The output of a request is bitwise the same in every batch.
assert torch.equal(attend(slice(1, 2)), out[1:2])
print("request 1 alone gives the same bits as request 1 in the batch of three")
