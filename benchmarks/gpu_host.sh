#!/usr/bin/env bash
# Prepares a GPU host that has no network, but Python 3.12 with torch, transformers and the test tools.
#
#   gpu_host.sh wheels [DIR=.whl]                  with network: downloads the wheels that such a host lacks
#   gpu_host.sh install [DIR=.whl] [SITE=/tmp/site]  on the host: installs them and registers this checkout
#
# The project itself is not pip-installed: install writes its metadata into SITE, which is what finds the
# backend by name, and prints the environment to use:
#
#   eval "$(benchmarks/gpu_host.sh install)" && encoder-cg demo
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
packages=(annotated-types pydantic pydantic-core pytest-timeout typing-extensions typing-inspection)

usage() {
    sed -n '4,5s/^# *//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

# The pinned requirement of a package, or its bare name where constraints.txt has none.
requirement() {
    grep -E "^$1==" "$repo/constraints.txt" || echo "$1"
}

download_wheels() {
    local dir=$1 package requirements=()
    for package in "${packages[@]}"; do
        requirements+=("$(requirement "$package")")
    done
    python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        -d "$dir" "${requirements[@]}"
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

install() {
    local dir=$1 site=$2
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        "$dir"/*.whl >&2
    site=$(cd "$site" && pwd)
    register_checkout "$site"
    printf 'export PYTHONPATH=%q PATH=%q\n' \
        "$site:$repo${PYTHONPATH:+:$PYTHONPATH}" "$site/bin:$PATH"
}

case ${1:-} in
    wheels) [[ $# -le 2 ]] || usage && download_wheels "${2:-.whl}" ;;
    install) [[ $# -le 3 ]] || usage && install "${2:-.whl}" "${3:-/tmp/site}" ;;
    *) usage ;;
esac
