#!/usr/bin/env bash
# Measures what the documents' tables are made of, on one otherwise idle GPU.
#
#   reproduce.sh readme OUT   what the README's table needs, three starts of each way, on as many GPUs if there are
#   reproduce.sh all OUT      every table, in hours; data_parallel needs four GPUs, connector_own_gpu two, vllm vLLM
#
# Results and logs are written to OUT. What is done there does not run again, so a run that was cut off goes on
# where it ended. `python benchmarks/bench.py tables OUT/*.json` then takes the results in.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# == 2 && $1 =~ ^(readme|all)$ ]] || { sed -n '4,5s/^# *//p' benchmarks/reproduce.sh >&2; exit 2; }
mkdir -p "$2"
out=$(cd "$2" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XDG_CACHE_HOME=$out/cache
python=${PYTHON:-python3}

shown="--only default measured_activations merged_projections pad_mlp_width"
tiles="--towers internvl3-8b --workloads tiles12"

# What is needed most first: a name in benchmarks/results, its case and options.
jobs=("readme encoder --readme")
[[ $1 == readme ]] || jobs+=(
    "host host"
    "kernels encoder $tiles --variants ours-auto compile-reduce-overhead --kernels --shared-cache"
    "accelerate accelerate"
    "backend backend"
    "embedding backend --embedding"
    "accelerate_adapters accelerate --adapters"
    "start start"
    "encoder encoder --shared-cache"
    "modes encoder --modes --shared-cache"
    "internvl encoder --towers internvl3-8b --workloads tiles1 tiles4 tiles12 --shared-cache"
    "towers towers"
    "requests requests"
    "connector connector"
    "products_activations products"
    "passes passes"
    "passes_deepseek_ocr passes --tower deepseek-ocr --sizes 1 4 --only default decomposed_bias dense_attention"
    "passes_internvl passes --tower internvl3-8b --sizes 1 4 12 $shown"
    "passes_qwen2_5 passes --tower qwen2.5-vl-7b --sizes 256 1024 4096 9216 $shown"
    "attention attention"
    "serve serve --models siglip-so400m-384"
    "serve_qwen3_vl serve --models qwen3-vl-8b"
    "vllm vllm"
    "vllm_serving_pairs vllm_serving --language-model eager --variants vllm ours --engines 2 --rounds 2"
    "vllm_serving_compiled vllm_serving --variants vllm ours-compiled --engines 2 --rounds 4"
    "invariant encoder --towers qwen3-vl-8b --variants ours-auto ours-invariant --shared-cache"
    "connector_own_gpu connector --parts beside --encoder-device cuda:1"
    "data_parallel data_parallel"
)

status=0
for job in "${jobs[@]}"; do
    read -r name case options <<< "$job"
    [[ -e $out/$name.done ]] && continue
    start=$SECONDS
    # shellcheck disable=SC2086  # options are words
    if "$python" benchmarks/bench.py "$case" $options --output "$out/$name.json" > "$out/$name.log" 2>&1; then
        touch "$out/$name.done"
        echo "$name: done, $((SECONDS - start)) s"
    else
        echo "$name: failed, $((SECONDS - start)) s; see $out/$name.log"
        status=1
    fi
done
exit $status
