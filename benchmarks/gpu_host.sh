#!/usr/bin/env bash
# Prepares a GPU host that has no network, but Python 3.12 with torch, transformers and the test tools.
#
#   gpu_host.sh wheels [DIR=.whl]                  with network: downloads the wheels that such a host lacks
#   gpu_host.sh install [DIR=.whl] [SITE=/tmp/site/site-packages]
#                                                  on the host: installs them and registers this checkout
#   gpu_host.sh wheels-attention [DIR=.whl-attention]
#                                                  with network: downloads what more attention kernels need
#   gpu_host.sh install-attention [DIR=.whl-attention] [SITE=/tmp/site/site-packages]
#                                                  on the host: installs that too; after install
#
# DIR of the attention kernels has two parts of less than 60 MiB, DIR/1 and DIR/2, for a host that takes no
# more at a time; there they must lie beside each other again.
#
# SITE needs a folder of Python's usual name, site-packages, in its path: QuACK takes functions that lie
# elsewhere for the caller's own, and compiles no epilogue with them.
#
# The project itself is not pip-installed: install writes its metadata into SITE, which is what finds the
# backend by name, and prints the environment to use. Such a host may have packages without the bytecode that
# pip would have compiled; the environment has every process keep it in SITE/bytecode, and `bytecode` compiles
# all of it, which a start that is to be measured needs:
#
#   gpu_host.sh bytecode                             in that environment: compiles all that Python would import
#
#   eval "$(benchmarks/gpu_host.sh install)" && encoder-cg demo
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
packages=(
    accelerate annotated-types anyio blake3 click execnet h11 httptools idna msgspec peft platformdirs plotext
    prometheus-client pydantic pydantic-core pytest-timeout pytest-xdist python-multipart starlette
    typing-extensions typing-inspection uvicorn
)

# FlashAttention 4 with the compiler that it calls, and cuDNN's front end. The largest wheel, of 88 MiB, is
# cut so that each part can be carried.
attention_packages=(
    apache-tvm-ffi einops flash-attn-4 nvidia-cudnn-frontend nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base
    nvidia-cutlass-dsl-libs-core quack-kernels torch-c-dlpack-ext
)
large_package=nvidia-cutlass-dsl-libs-cu13
first_part=52m

usage() {
    sed -n '4,10s/^# *//p; /^#   gpu_host.sh bytecode/s/^# *//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

# The pinned requirement of a package, or its bare name where constraints.txt has none.
requirement() {
    grep -E "^$1==" "$repo/constraints.txt" || echo "$1"
}

# download DIR PIP-OPTION... PACKAGE...
download() {
    local dir=$1
    shift
    python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$dir" "$@"
}

# download_pinned DIR PACKAGE...
download_pinned() {
    local dir=$1 package requirements=()
    shift
    for package in "$@"; do
        requirements+=("$(requirement "$package")")
    done
    download "$dir" "${requirements[@]}"
}

download_wheels() {
    download_pinned "$1" "${packages[@]}"
}

download_attention_wheels() {
    local dir=$1 wheel
    rm -rf "$dir/1" "$dir/2"
    mkdir -p "$dir/1" "$dir/2"
    download_pinned "$dir/2" "${attention_packages[@]}" "$large_package"
    wheel=$(find "$dir/2" -name "${large_package//-/_}-*.whl")
    split -b "$first_part" -d -a 1 "$wheel" "$wheel.part"
    rm "$wheel"
    mv "$wheel.part0" "$dir/1/"
}

# What an editable install would leave behind: the entry points in SITE, the script in SITE/bin.
register_checkout() {
    python3 - "$repo" "$1" <<'PY'
import sys
import tomllib
from pathlib import Path

repo, site = map(Path, sys.argv[1:])
project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
name, version = project["name"], project["version"]
groups = {"console_scripts": project["scripts"], **project["entry-points"]}

info = site / f"{name.replace('-', '_')}-{version}.dist-info"
files = {
    info / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    info / "entry_points.txt": "\n".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    ),
}
for script, target in project["scripts"].items():
    module, _, attribute = target.partition(":")
    files[site / "bin" / script] = (
        f"#!/usr/bin/env python3\nimport sys\n\nfrom {module} import {attribute}\n\nsys.exit({attribute}())\n"
    )

for path, text in files.items():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if path.parent.name == "bin":
        path.chmod(0o755)
record = info / "RECORD"
record.write_text("".join(f"{path.relative_to(site)},,\n" for path in [*files, record]))
PY
}

# install_wheels SITE WHEEL...
install_wheels() {
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$@" >&2
}

# print_environment SITE [PACKAGES]: the directories that Python searches, PACKAGES first.
print_environment() {
    local site=$1 packages=${2:+$2:}
    printf 'unset PYTHONDONTWRITEBYTECODE; export PYTHONPYCACHEPREFIX=%q PYTHONPATH=%q PATH=%q\n' \
        "$site/bytecode" "$packages$site:$repo${PYTHONPATH:+:$PYTHONPATH}" "$site/bin:$PATH"
}

# Sources that do not compile, such as templates and tests of errors, are of no concern.
compile_bytecode() {
    local folders
    mapfile -t folders < <(python3 -c 'import os, sys; print(*filter(os.path.isdir, sys.path[1:]), sep="\n")')
    python3 -W ignore -m compileall -q -j 0 "${folders[@]}" > /dev/null || true
}

install() {
    local dir=$1 site=$2
    install_wheels "$site" "$dir"/*.whl
    site=$(cd "$site" && pwd)
    register_checkout "$site"
    print_environment "$site"
}

# Wheels that share a package (nvidia_cutlass_dsl) are unpacked one over the other, which pip would not do.
install_attention() {
    local dir=$1 site=$2 wheel joined
    mkdir -p "$site"
    joined=$(mktemp -d)
    for wheel in "$dir"/1/*.part0; do
        wheel=$(basename "$wheel" .part0)
        cat "$dir/1/$wheel.part0" "$dir/2/$wheel.part1" > "$joined/$wheel"
    done
    for wheel in "$dir"/2/*.whl "$joined"/*.whl; do
        python3 -m zipfile -e "$wheel" "$site"
    done
    rm -r "$joined"
    site=$(cd "$site" && pwd)
    print_environment "$site" "$site/nvidia_cutlass_dsl/dsl_packages"
}

case ${1:-} in
    wheels) [[ $# -le 2 ]] || usage && download_wheels "${2:-.whl}" ;;
    install) [[ $# -le 3 ]] || usage && install "${2:-.whl}" "${3:-/tmp/site/site-packages}" ;;
    wheels-attention) [[ $# -le 2 ]] || usage && download_attention_wheels "${2:-.whl-attention}" ;;
    install-attention) [[ $# -le 3 ]] || usage && install_attention "${2:-.whl-attention}" "${3:-/tmp/site/site-packages}" ;;
    bytecode) [[ $# -eq 1 ]] || usage && compile_bytecode ;;
    *) usage ;;
esac
