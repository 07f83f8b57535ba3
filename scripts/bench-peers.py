#!/usr/bin/env python3
"""INT2 decode attention beside the best BF16 attention that PyTorch ships, on the same GPU in the same run.

    scripts/bench-peers.py [--oscar target/release/oscar] [--repeats 60] [--json FILE]

Peers: cuDNN and FlashAttention through `torch.nn.functional.scaled_dot_product_attention`, one query token a sequence,
bf16. FlashAttention reads grouped heads through a view that stacks a group's queries as rows, which is faster than its
`enable_gqa`. Ours reads 64 sink and 256 recent tokens in BF16 and all others in INT2, merged. Every timing: device
events, L2 emptied before each repeat by reading 512 MB, median. Needs torch with CUDA.
"""

import argparse
import json
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD_DIM, KV_HEADS = 128, 8
# batch, context, query heads a KV head
SHAPES = [
    (1, 102_400, 4),
    (1, 32_768, 4),
    (8, 32_768, 4),
    (32, 8_192, 4),
    (32, 32_768, 4),
    (128, 8_192, 4),
    (8, 32_768, 8),
    (8, 32_768, 12),
    (8, 32_768, 16),
]


def microseconds(work, repeats: int, flush: torch.Tensor) -> float:
    for _ in range(5):
        work()
    events = []
    for _ in range(repeats):
        flush.view(torch.int64).max()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def bf16_peers(batch: int, context: int, group: int, repeats: int, flush: torch.Tensor) -> dict:
    def random(heads, tokens):
        return torch.randn(batch, heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    k, v = random(KV_HEADS, context), random(KV_HEADS, context)
    q = random(KV_HEADS * group, 1)
    rows = q.view(batch, KV_HEADS, group, HEAD_DIM)

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def flash():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(rows, k, v)

    times = {}
    for name, work in (("cudnn", cudnn), ("flash", flash)):
        try:
            times[name] = microseconds(work, repeats, flush)
        except RuntimeError as error:
            print(f"{name} does not run: {str(error).splitlines()[0]}", file=sys.stderr)
    if not times:
        sys.exit("no BF16 peer runs here")
    return times


def ours(oscar: str, batch: int, context: int, group: int, repeats: int) -> dict:
    command = [oscar, "bench", "decode", "--format", "json", "--device", "cuda:0"]
    for flag, value in {
        "batch": batch,
        "context": context,
        "heads": KV_HEADS * group,
        "kv-heads": KV_HEADS,
        "head-dim": HEAD_DIM,
        "repeats": repeats,
    }.items():
        command += [f"--{flag}", str(value)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oscar", default="target/release/oscar")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", metavar="FILE", help="keep all numbers here")
    args = parser.parse_args()
    flush = torch.randint(0, 255, (512 << 20,), dtype=torch.uint8, device="cuda")
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, {args.repeats} repeats\n")
    print("| batch × context, group | INT2 (us) | TB/s | of copy | BF16 cuDNN (us) | BF16 Flash (us) | ratio to the best |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for batch, context, group in SHAPES:
        peers = bf16_peers(batch, context, group, args.repeats, flush)
        torch.cuda.empty_cache()
        mine = ours(args.oscar, batch, context, group, args.repeats)
        ratio = min(peers.values()) / mine["us_median"]
        rows.append({"batch": batch, "context": context, "group": group, "int2": mine, "bf16_us": peers, "ratio": ratio})
        shown = {name: f"{us:.1f}" for name, us in peers.items()}
        print(
            f"| {batch} × {context:,}, {group} | {mine['us_median']:.1f} | {mine['tb_per_s']:.2f} |"
            f" {mine['tb_per_s'] / mine['copy_tb_per_s']:.0%} | {shown.get('cudnn', '')} | {shown.get('flash', '')} |"
            f" {ratio:.2f} |",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"gpu": gpu, "torch": torch.__version__, "rows": rows}, file, indent=1)


main()
