#!/usr/bin/env bash
# Makes a CUDA 13.0 toolkit from registry packages, on a machine with neither GPU, driver nor NVIDIA repository.
#
#   scripts/cuda-toolchain.sh [DEST]        DEST defaults to target/cuda; then:
#   . DEST/env.sh && cargo build --release --features cuda
#
# It holds nvcc, its headers, and link-time shims that open libcuda, cuBLAS, cuRAND and NVRTC at their first call, so
# that the binary starts on machines without CUDA. On a machine with a CUDA toolkit this script is not needed.
# Needs: python3 with pip, cargo, gcc, ar; x86-64 Linux.
set -euo pipefail
cd "$(dirname "$0")/.."
dest=${1:-target/cuda}
mkdir -p "$dest"
dest=$(realpath "$dest")

if [ ! -x "$dest/bin/nvcc" ]; then
  site=$(mktemp -d "$dest/.site.XXXXXX")
  trap 'rm -rf "$site"' EXIT
  python3 -m pip install -q --root-user-action=ignore --disable-pip-version-check \
    --no-deps --no-compile --only-binary=:all: --target "$site" \
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96
  # nvcc last: it is what says that the toolkit is whole.
  for part in include lib nvvm bin; do
    rm -rf "${dest:?}/$part"
    [ ! -e "$site/nvidia/cu13/$part" ] || mv "$site/nvidia/cu13/$part" "$dest/"
  done
  rm -rf "$site"
  trap - EXIT
fi
ln -sfn lib "$dest/lib64"
ln -sf libnvvm.so.4 "$dest/lib/libnvvm.so"
# cudarc names libcudart when it links; the static one adds nothing to what the binary needs.
ln -sf libcudart_static.a "$dest/lib/libcudart.a"

# The shims must offer exactly what the locked cudarc binds.
cudarc=$(cargo metadata --locked --format-version 1 --features cuda | python3 -c '
import json, pathlib, sys
print(*(pathlib.Path(p["manifest_path"]).parent for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
python3 scripts/cuda-shims.py "$cudarc" "$dest/lib/stubs"

cat >"$dest/env.sh" <<EOF
export CUDA_HOME=$dest CUDA_PATH=$dest NVCC=$dest/bin/nvcc PATH=$dest/bin:\$PATH
export CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-90} CUDARC_CUDA_VERSION=13000 CUDAFORGE_THREADS=\${CUDAFORGE_THREADS:-$(nproc)}
EOF
"$dest/bin/nvcc" --version | sed -n 's/^Cuda compilation tools, /nvcc: /p'
echo "next: . $dest/env.sh && cargo build --release --features cuda"
