#!/usr/bin/env python3
"""Time `oscar collect` against a plain PyTorch CPU forward pass of the same shapes, in one run.

    bench-pytorch.py MODEL.gguf [TOKENS] [THREADS]      default: 30000 tokens, all cores

MODEL is SmolLM2-135M-Instruct (scripts/fetch-smollm2.py). Both run f32 over sequences of 4096 tokens of one text. The
PyTorch side has random weights, scaled_dot_product_attention and the language-model head, and gathers nothing; `oscar`
starts, tokenizes, accumulates all moments and writes them. Needs torch.
"""

import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 576, 1536, 30, 9, 3, 64, 49152
SEQ_LEN = 4096


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@torch.no_grad()
def forward(tokens):
    """Seconds for all sequences, of which the head."""
    random = lambda *shape: torch.randn(*shape) * 0.02
    attention, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layers = [
        [random(*shape) for shape in ((attention, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (HIDDEN, attention),
                                      (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]
        for _ in range(LAYERS)
    ]
    embedding, ones = random(VOCABULARY, HIDDEN), torch.ones(HIDDEN)
    norm = lambda x: F.rms_norm(x, (HIDDEN,), ones, 1e-5)
    frequencies = 1e5 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    begin, head = time.perf_counter(), 0.0
    for start in range(0, tokens, SEQ_LEN):
        n = min(SEQ_LEN, tokens - start)
        angles = torch.arange(n)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        x = embedding[torch.randint(VOCABULARY, (n,))]
        for q, k, v, o, gate, up, down in layers:
            y = norm(x)
            split = lambda w, heads: (y @ w.T).view(n, heads, HEAD_DIM).transpose(0, 1)
            out = F.scaled_dot_product_attention(
                rotate(split(q, HEADS), cos, sin)[None], rotate(split(k, KV_HEADS), cos, sin)[None],
                split(v, KV_HEADS)[None], is_causal=True, enable_gqa=True)[0]
            x = x + out.transpose(0, 1).reshape(n, attention) @ o.T
            y = norm(x)
            x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
        lap, y = time.perf_counter(), norm(x)
        for rows in y.split(512):
            rows @ embedding.T
        head += time.perf_counter() - lap
    return time.perf_counter() - begin, head


def main():
    model = sys.argv[1]
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 30_000
    threads = int(sys.argv[3]) if len(sys.argv) > 3 else os.cpu_count()
    root = pathlib.Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        # One long text, so that every sequence is one prompt of 4096 tokens and attention does all of its work.
        text = pathlib.Path(folder, "text.txt")
        text.write_text("\n\n".join(p.read_text() for p in sorted(root.glob("calib_data/*/*.txt"))))
        command = [root / "target/release/oscar", "collect", "--model", model, "--data", text, "--tokens", str(tokens),
                   "--holdout", "0", "--out", f"{folder}/moments.safetensors"]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       env={**os.environ, "RAYON_NUM_THREADS": str(threads)})
        ours = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    theirs, head = forward(tokens)
    print(f"{tokens} tokens, {threads} threads")
    print(f"oscar collect  {ours:7.1f} s   peak RSS {peak:.0f} MiB")
    print(f"PyTorch        {theirs:7.1f} s   of which the head {head:.1f} s")
    print(f"ratio          {ours / theirs:7.2f}     without the head {ours / (theirs - head):.2f}")


if __name__ == "__main__":
    main()
