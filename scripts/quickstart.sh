#!/usr/bin/env bash
# Build oscar, fetch SmolLM2-135M-Instruct, calibrate it on the bundled corpus and validate the result.
# Needs Rust, python3 and pip; no GPU, no access to a model hub. Run it again after a break: it goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."

zoo=${OSCAR_ZOO:-target/quickstart}
entry=$zoo/HuggingFaceTB__SmolLM2-135M-Instruct/balanced
moments=$zoo/smollm2.moments.safetensors

cargo build --release --locked
oscar=target/release/oscar

model=$(scripts/fetch-smollm2.py target/models)
"$oscar" calibrate --model "$model" --model-id HuggingFaceTB/SmolLM2-135M-Instruct --moments "$moments" --out "$entry"
"$oscar" verify "$entry"
"$oscar" validate "$entry" --model "$model" --moments "$moments" --against oscar,hadamard,naive --tokens 8192

printf '\nThe zoo entry lies in %s\n' "$entry"
printf 'Look at it:    %s/report.html\n' "$entry"
printf 'Look into it:  %s inspect %s\n' "$oscar" "$entry"
