#!/usr/bin/env bash
# Everything that needs a GPU, on a machine that has one; builds nothing.
#
#   scripts/gpu-check.sh FOLDER [MODEL.gguf]
#
# FOLDER is what `scripts/gpu-pack.sh` made. With a model, the entry of the zoo is also served on the GPU. Ends with a
# table, and with 1 where a check failed. Logs lie in $OSCAR_GPU_LOGS, by default a new temporary folder.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath "${1:?usage: scripts/gpu-check.sh FOLDER [MODEL.gguf]}")
model=${2:-}
logs=${OSCAR_GPU_LOGS:-$(mktemp -d)}
mkdir -p "$logs"
oscar=$folder/oscar
entry=zoo/HuggingFaceTB__SmolLM2-135M-Instruct/balanced

rows=()
failed=0
check() { # NAME COMMAND...
  local name=$1 start=$SECONDS verdict=ok
  shift
  printf '== %s: %s\n' "$name" "$*"
  "$@" >"$logs/$name.log" 2>&1 || verdict=FAILED
  # A test that found no GPU has tested nothing.
  if grep -q '^skipped: no GPU' "$logs/$name.log"; then verdict=SKIPPED; fi
  if [ "$verdict" != ok ]; then
    failed=1
    tail -n 40 "$logs/$name.log"
  fi
  rows+=("$(printf '| %-24s | %-7s | %5d s |' "$name" "$verdict" $((SECONDS - start)))")
}

check devices "$oscar" devices
grep -q 'cuda:0' "$logs/devices.log" || { echo 'no GPU was found'; exit 1; }
cat "$logs/devices.log"

# One after the other: a test that captures a graph bears no other thread that waits for the whole GPU.
for test in "$folder"/gpu_*; do
  check "$(basename "$test")" "$test" --nocapture --test-threads 1
done
# Small shapes alone: the sanitizer is slow.
sanitized=(
  'gpu_decode a_step_is_one_graph'
  'gpu_demote a_step_is_one_graph'
  'gpu_prefill a_chunk_attends_to_pages_and_to_itself'
  'gpu_pool the_gpu_pool_is_a_list_of_tokens'
)
if command -v compute-sanitizer >/dev/null; then
  for test in "${sanitized[@]}"; do
    read -r binary name <<<"$test"
    check "memcheck-$binary" timeout 180 compute-sanitizer --error-exitcode 9 "$folder/$binary" --exact "$name"
    grep -q 'test result: ok. 1 passed' "$logs/memcheck-$binary.log" || { echo "memcheck ran no test: $test"; failed=1; }
  done
else
  echo 'compute-sanitizer is not on the PATH: not run'
fi
for shape in '1 102400' '8 32768' '32 32768'; do
  read -r batch context <<<"$shape"
  check "decode-${batch}x$context" "$oscar" bench decode --batch "$batch" --context "$context"
done
for rounding in nearest feedback; do
  check "demote-$rounding" "$oscar" bench demote --rounding "$rounding"
done
if [ -n "$model" ]; then
  check collect "$oscar" calibrate --model "$model" --device cuda:0 --out "$logs/entry" --moments "$logs/moments.safetensors"
  check validate "$oscar" validate "$entry" --model "$model" --device cuda:0 --no-write --against oscar --max-kl-ratio oscar=0.4 --moments "$logs/moments.safetensors"
  check validate-real "$oscar" validate "$entry" --model "$model" --device cuda:0 --no-write --cache real
  check generate "$oscar" generate --model "$model" --zoo "$entry" --device cuda:0 --prompt 'The capital of France is' --max-tokens 64 --compare
fi

printf '\n| %-24s | %-7s | %-7s |\n|%s|%s|%s|\n' check result time "$(printf -- '-%.0s' {1..26})" "$(printf -- '-%.0s' {1..9})" "$(printf -- '-%.0s' {1..9})"
printf '%s\n' "${rows[@]}"
for log in "$logs"/{decode,demote}-*.log; do
  [ -e "$log" ] && printf '%s: %s\n' "$(basename "$log" .log)" "$(grep -m1 'TB/s' "$log")"
done
for log in "$logs"/{validate,validate-real,generate}.log; do
  [ -e "$log" ] && printf '\n%s\n' "$(basename "$log" .log)" && cat "$log"
done
exit "$failed"
