#!/usr/bin/env bash
# Runs the GPU tests and the benchmarks behind benchmarks/results, one job a GPU at a time.
#
#   reproduce.sh quiet OUT [SECONDS]   on the first GPU, one after the other: what times the host; the stored
#                                      results are of an environment without further attention packages
#   reproduce.sh spread OUT [SECONDS]  on all GPUs, each with its share of the processors: the other tests, and
#                                      what times the GPU
#
# SECONDS: no job begins later, and none runs longer; 3600 if not given. Results and logs are written to OUT as
# they come, and OUT/jobs says how every job ended; what is done there already does not run again, so a run
# that was cut off goes on where it ended. Results are named as in benchmarks/results; those of
# encoder.py are in OUT/encoder_*, to be joined as docs/performance.md says.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    sed -n '4,7s/^# *//p' benchmarks/reproduce.sh >&2
    exit 2
}

[[ $# -ge 2 && $1 =~ ^(quiet|spread)$ ]] || usage
mkdir -p "$2"
out=$(cd "$2" && pwd)
deadline=$((SECONDS + ${3:-3600}))
export PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}

# Several processes of tests compile at once.
tests() { echo "tests_$1|OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=4 python3 -m pytest -q -p no:cacheprovider ${*:2}"; }
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

# What is needed most first.
spread_jobs() {
    local file most="eager ours-auto graph-exact compile-reduce-overhead"
    for file in tests/gpu/test_*.py; do
        case $file in
            *parallel.py) ;; # they need two GPUs
            *attention_kernels.py | *breakable.py) tests "$(basename "$file" .py)" -n 6 -m "'gpu and not alone'" "$file" ;;
            *) tests "$(basename "$file" .py)" -n 3 -m "'gpu and not alone'" "$file" ;;
        esac
    done
    encoder qwen3_images qwen3-vl-8b "$most" --workloads 1x224 1x448 1x896 1x1344
    encoder deepseek deepseek-ocr "$most"
    encoder qwen3_mixed qwen3-vl-8b "$most" --workloads mixed8 mixed8_big random_mm_20x336
    encoder internvl internvl3-8b "$most"
    benchmark kernel_times
    benchmark mixed_requests
    encoder qwen2_5 qwen2.5-vl-7b "$most" --workloads 1x224 1x448 1x896 1x1344 mixed8 mixed8_big random_mm_20x336 clip16
    encoder qwen3_clips qwen3-vl-8b "$most" --workloads clip16 clip32 clip64
    encoder qwen3_photos qwen3-vl-8b eager ours-auto graph-exact --workloads photos
    benchmark attention
    benchmark biased_attention
}

# On two GPUs each.
paired_jobs() {
    tests parallel -m "'gpu and not alone'" tests/gpu/test_*_parallel.py
    benchmark data_parallel
}

# pending KIND: the jobs of a kind that are not done.
pending() {
    local job
    "$1_jobs" | while IFS= read -r job; do
        grep -qs "^${job%%|*}: done" "$out/jobs" || echo "$job"
    done
}

# run GPUS PROCESSORS JOB: what is between its name and its command is a bar.
run() {
    local name=${3%%|*} start=$SECONDS status=0
    CUDA_VISIBLE_DEVICES=$1 XDG_CACHE_HOME=$out/cache_$1 timeout $((deadline - SECONDS)) \
        taskset -c "$2" bash -c "${3#*|}" > "$out/$name.log" 2>&1 || status=$?
    echo "$name: $([[ $status == 0 ]] && echo done || echo "failed ($status)"), $((SECONDS - start)) s on GPU $1" \
        | tee -a "$out/jobs"
}

# next_job: takes the first line of the list, which GPUs share.
next_job() {
    flock "$out/list.lock" bash -c 'head -n 1 "$1"; sed -i 1d "$1"' - "$out/list"
}

# serve GPUS PROCESSORS
serve() {
    local job
    while ((SECONDS < deadline)) && job=$(next_job) && [[ -n $job ]]; do
        run "$1" "$2" "$job"
    done
}

all="0-$(($(nproc) - 1))"
mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
pending "$1" > "$out/list"
if [[ $1 == quiet ]]; then
    serve "${gpus[0]}" "$all"
else
    share=$(($(nproc) / ${#gpus[@]}))
    for i in "${!gpus[@]}"; do
        own="$((i * share))-$(((i + 1) * share - 1))"
        serve "${gpus[i]}" "$( ((share > 0)) && echo "$own" || echo "$all")" &
    done
    wait
    if ((${#gpus[@]} > 1)); then
        pending paired >> "$out/list"
        serve "${gpus[0]},${gpus[1]}" "$all"
    fi
fi
sed 's/|.*/: not begun/' "$out/list" | tee -a "$out/jobs"
