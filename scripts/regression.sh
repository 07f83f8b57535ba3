#!/usr/bin/env bash
# Calibrate SmolLM2-135M-Instruct on a reduced budget and hold what this project claims of it:
#   regression.sh MODEL.gguf
# KL of the defaults against the released method, and against the entry that zoo/ keeps.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${1:?usage: regression.sh MODEL.gguf}
oscar=target/release/oscar
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cargo build --release --locked --quiet
"$oscar" calibrate --model "$model" --model-id HuggingFaceTB/SmolLM2-135M-Instruct \
  --tokens 12000 --out "$work/fresh" --moments "$work/moments.safetensors"
"$oscar" verify "$work/fresh" zoo/HuggingFaceTB__SmolLM2-135M-Instruct/balanced
"$oscar" validate "$work/fresh" --model "$model" --moments "$work/moments.safetensors" --tokens 8192 \
  --against oscar,zoo/HuggingFaceTB__SmolLM2-135M-Instruct/balanced \
  --max-kl-ratio oscar=0.12 --max-kl-ratio balanced-2=1.25
