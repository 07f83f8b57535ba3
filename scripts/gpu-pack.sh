#!/usr/bin/env bash
# Collects what `scripts/gpu-check.sh` runs on a machine with a GPU: the binary and the GPU tests, built here.
#
#   scripts/gpu-pack.sh FOLDER        FOLDER/{oscar,gpu_*}; copy it and the repository to the machine
#
# Needs a CUDA toolkit (scripts/cuda-toolchain.sh), no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/gpu-pack.sh FOLDER}
mkdir -p "$folder"

tests=()
for file in tests/gpu_*.rs; do
  tests+=(--test "$(basename "$file" .rs)")
done
cargo test --release --locked --features cuda --no-run "${tests[@]}" --message-format json |
  python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        print(message["target"]["name"], message["profile"]["test"], message["executable"])' |
  while read -r name is_test path; do
    case $name:$is_test in
    gpu_*:True) cp "$path" "$folder/$name" ;;
    esac
  done
cargo build --release --locked --features cuda
cp target/release/oscar "$folder/oscar"
strip "$folder"/*
ls -l "$folder"
