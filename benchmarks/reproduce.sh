#!/usr/bin/env bash
# Runs the GPU tests and the benchmarks behind benchmarks/results, one job a GPU at a time.
#
#   reproduce.sh quiet OUT [SECONDS]   on the first GPU, one after the other: what times the host; the stored
#                                      results are of an environment without further attention packages
#   reproduce.sh spread OUT [SECONDS]  on all GPUs: the other tests, and what times the GPU
#
# SECONDS: no job begins later, and none runs longer; 3600 if not given. Results and logs are written to OUT as
# they come, and OUT/jobs says how every job ended. Results are named as in benchmarks/results; those of
# encoder.py are in OUT/encoder_*, to be joined as docs/performance.md says.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    sed -n '4,6s/^# *//p' benchmarks/reproduce.sh >&2
    exit 2
}

[[ $# -ge 2 && $1 =~ ^(quiet|spread)$ ]] || usage
mkdir -p "$2"
out=$(cd "$2" && pwd)
deadline=$((SECONDS + ${3:-3600}))
export PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}

tests() { echo "tests_$1|python3 -m pytest -q -p no:cacheprovider ${*:2}"; }
benchmark() { echo "$1|python3 benchmarks/${2:-$1}.py --output $out/$1_h200.json ${*:3}"; }
encoder() {
    echo "encoder_$1|python3 benchmarks/encoder.py --shared-cache --samples 12 --seconds 0.3 --output $out/encoder_$1" \
        "--towers $2 --contenders ${*:3}"
}

quiet_jobs() {
    benchmark host_time
    tests alone -m "'gpu and alone'" tests/gpu
    benchmark startup
}

# The longest first.
spread_jobs() {
    local file most="eager ours-auto graph-exact compile-reduce-overhead"
    encoder qwen3_images qwen3-vl-8b "$most" --workloads 1x224 1x448 1x896 1x1344
    encoder deepseek deepseek-ocr "$most"
    encoder qwen3_mixed qwen3-vl-8b "$most" --workloads mixed8 mixed8_big random_mm_20x336
    encoder internvl internvl3-8b "$most"
    encoder qwen2_5 qwen2.5-vl-7b "$most" --workloads 1x224 1x448 1x896 1x1344 mixed8 mixed8_big random_mm_20x336 clip16
    encoder qwen3_clips qwen3-vl-8b "$most" --workloads clip16 clip32 clip64
    encoder qwen3_photos qwen3-vl-8b eager ours-auto graph-exact --workloads photos
    for file in tests/gpu/test_*.py; do
        case $file in
            *parallel.py) ;; # they need two GPUs
            *attention_kernels.py | *breakable.py) tests "$(basename "$file" .py)" -n 6 -m "'gpu and not alone'" "$file" ;;
            *) tests "$(basename "$file" .py)" -n 3 -m "'gpu and not alone'" "$file" ;;
        esac
    done
    benchmark mixed_requests
    benchmark attention
    benchmark biased_attention
    benchmark kernel_times
}

# run GPU JOB: what is between its name and its command is a bar.
run() {
    local name=${2%%|*} start=$SECONDS status=0
    CUDA_VISIBLE_DEVICES=$1 XDG_CACHE_HOME=$out/cache_$1 timeout $((deadline - SECONDS)) \
        bash -c "${2#*|}" > "$out/$name.log" 2>&1 || status=$?
    echo "$name: $([[ $status == 0 ]] && echo done || echo "failed ($status)"), $((SECONDS - start)) s on GPU $1" \
        | tee -a "$out/jobs"
}

# next_job: takes the first line of the list, which GPUs share.
next_job() {
    flock "$out/list.lock" bash -c 'head -n 1 "$1"; sed -i 1d "$1"' - "$out/list"
}

serve() {
    local job
    while ((SECONDS < deadline)) && job=$(next_job) && [[ -n $job ]]; do
        run "$1" "$job"
    done
}

mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
"$1_jobs" > "$out/list"
if [[ $1 == quiet ]]; then
    serve "${gpus[0]}"
else
    for gpu in "${gpus[@]}"; do
        serve "$gpu" &
    done
    wait
    if ((${#gpus[@]} > 1 && SECONDS < deadline)); then
        run "${gpus[0]},${gpus[1]}" "$(tests parallel -m "'gpu and not alone'" tests/gpu/test_*_parallel.py)"
        run "${gpus[0]},${gpus[1]}" "$(benchmark data_parallel)"
    fi
fi
sed 's/|.*/: not begun/' "$out/list" | tee -a "$out/jobs"
