#!/usr/bin/env bash
# Everything that needs GPUs, in one go:
#   bench/on_gpu.sh [all|tests|verify|programs|sanitizer|demo|overhead|kernels|linear|train|sync|gradients|losses|clients …]
#
# Needs a python3 that has torch, and no network. QSHARD_LIBRARY names a prebuilt libqshard.so
# with its libqshard_impl.so beside it; without it the library is built here. Logs and results go to $OUT (default: bench/results/gpu).
# TEST_ARGS goes to pytest (--ranks-share-gpus: worlds of more ranks than GPUs, too), TRAIN_ARGS to
# bench/train_fsdp.py, LOSSES names the configurations of bench/losses.py.
# A step that fails does not stop the next; the exit status says whether any did.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-bench/results/gpu}
mkdir -p "$out"
python=${PYTHON:-python3}
failed=()

# step NAME COMMAND…: runs it, output to the screen and to $out/NAME.log.
step() {
  local name=$1 start=$SECONDS
  shift
  echo "=== $name"
  if ! "$@" 2>&1 | tee "$out/$name.log"; then failed+=("$name"); fi
  echo "=== $name took $((SECONDS - start)) s"
}

build() {
  cmake --preset ci -DPython_EXECUTABLE="$(command -v "$python")" -DQSHARD_CUDA=ON \
    -DQSHARD_BUILD_TESTS="$([ -e /usr/include/gtest/gtest.h ] && echo ON || echo OFF)" &&
    cmake --build --preset ci
}

# google_tests [COMMAND…]: the GoogleTests (QSHARD_TESTS names a prebuilt binary of them), run by
# COMMAND if there is one; nothing where there is no binary.
google_tests() {
  local tests=${QSHARD_TESTS:-build/ci/qshard_tests}
  if ! [ -x "$tests" ]; then
    echo "no GoogleTests at $tests: not run"
    return
  fi
  LD_LIBRARY_PATH=$(dirname "$QSHARD_LIBRARY"):$("$python" -c 'import torch; print(torch.__path__[0])')/lib \
    "$@" "$tests" --gtest_brief=1
}

cuda_tests() {
  local status=0
  google_tests || status=1
  # shellcheck disable=SC2086
  "$python" -m pytest -q --durations=10 -k "cuda or nccl" ${TEST_ARGS:-} test/python || status=1
  return $status
}

# Random programs, a minute or two of them: seeds from $PROGRAMS_SEED on (default: 0).
programs() {
  local run=("$python" test/python/programs/random_programs.py --device cuda --seed "${PROGRAMS_SEED:-0}" --no-shrink)
  local status=0
  "${run[@]}" --ranks 1 --programs 400 --jobs 6 || status=1
  # Ranks share a GPU where there is one.
  "${run[@]}" --ranks 2 --programs 60 --jobs 3 || status=1
  return $status
}

# Our kernels at the edge shapes of their tests. Only they are instrumented, so initcheck must not
# look at copies: it knows nothing of what torch's kernels wrote.
sanitizer() {
  local tool
  for tool in memcheck racecheck "initcheck --check-api-memory-access no"; do
    # shellcheck disable=SC2086
    google_tests compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name kns=qshard || return
  done
}

overhead() {
  "$python" bench/host_overhead.py --device cuda --json "$out/host_overhead.json"
}

kernels() {
  "$python" bench/kernels.py --json "$out/kernels.json"
}

linear() {
  "$python" bench/linear.py --json "$out/linear.json"
}

train() {
  local gpus
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  if ((gpus < 2)); then
    echo "train needs two GPUs or more: not run"
    return
  fi
  # shellcheck disable=SC2086
  "$python" -m torch.distributed.run --standalone --nproc-per-node="$gpus" bench/train_fsdp.py \
    --breakdown --json "$out/train.json" ${TRAIN_ARGS:-}
}

sync_weights() {
  local gpus status=0 vocabulary
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  if ((gpus < 2)); then
    echo "sync needs two GPUs or more: not run"
    return
  fi
  for vocabulary in 0 32000; do
    "$python" -m torch.distributed.run --standalone --nproc-per-node=2 bench/sync.py \
      --vocabulary $vocabulary --json "$out/sync-$vocabulary.json" || status=1
  done
  return $status
}

gradients() {
  local gpus status=0
  "$python" bench/gradients.py kernels --json "$out/gradient-kernels.json" || status=1
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  if ((gpus < 2)); then
    echo "steps and losses need two GPUs or more: not run"
    return $status
  fi
  local run=("$python" -m torch.distributed.run --standalone --nproc-per-node=2 bench/gradients.py)
  "${run[@]}" steps --json "$out/gradient-steps.json" || status=1
  "${run[@]}" steps --over tcp --json "$out/gradient-steps-tcp.json" || status=1
  if ((gpus >= 4)); then
    "$python" -m torch.distributed.run --standalone --nproc-per-node=4 bench/gradients.py steps \
      --replicas 2 --over tcp --json "$out/gradient-steps-hsdp-tcp.json" || status=1
  fi
  return $status
}

losses() {
  local gpus
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  # shellcheck disable=SC2086
  "$python" -m torch.distributed.run --standalone --nproc-per-node="$gpus" bench/losses.py \
    ${LOSSES:-bf16 float8_blockwise bf16:reduced_float8 bf16:reduced_mxfp8 bf16:reduced_nvfp4 \
      bf16:reduced_nvfp4:stochastic} --json "$out/losses.json"
}

clients() {
  local gpus
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  if ((gpus < 2)); then
    echo "clients needs two GPUs or more: not run"
    return
  fi
  "$python" bench/clients.py --json "$out/clients.json"
}

demo() {
  "$python" examples/demo.py --steps 200 --out "$out/demo" &&
    cp "$out/demo/loss.png" "$out/demo/results.json" "$out/" && rm -r "$out/demo/checkpoints"
}

wanted=" ${*:-all} "
wants() { [[ $wanted == *" all "* || $wanted == *" $1 "* ]]; }

if [ -z "${QSHARD_LIBRARY:-}" ]; then
  step build build
  export QSHARD_LIBRARY=$PWD/build/ci/libqshard.so
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if wants tests; then step tests cuda_tests; fi
if wants verify; then step verify "$python" -m qshard verify --json "$out/verify.json"; fi
if wants programs; then step programs programs; fi
if wants sanitizer; then step sanitizer sanitizer; fi
if wants demo; then step demo demo; fi
if wants overhead; then step overhead overhead; fi
if wants kernels; then step kernels kernels; fi
if wants linear; then step linear linear; fi
if wants train; then step train train; fi
if wants sync; then step sync sync_weights; fi
if wants gradients; then step gradients gradients; fi
if wants losses; then step losses losses; fi
if [[ $wanted == *" clients "* ]]; then step clients clients; fi # needs packages that not all have

echo
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | xargs)
echo "######## summary: $gpus"
for log in tests sanitizer; do
  [ -e "$out/$log.log" ] && grep -E ' (passed|failed)|  (PASSED|FAILED)  |SUMMARY:' "$out/$log.log"
done
[ -e "$out/verify.log" ] && tail -1 "$out/verify.log"
[ -e "$out/programs.log" ] && grep -E ' programs on ' "$out/programs.log"
[ -e "$out/demo.log" ] && grep -A 12 'gathered B/step' "$out/demo.log"
[ -e "$out/overhead.log" ] && sed -n '/host overhead/,$p' "$out/overhead.log"
for log in kernels linear; do
  [ -e "$out/$log.log" ] && sed -n '/worst shapes/,$p' "$out/$log.log"
done
[ -e "$out/train.log" ] && sed -n '/^qshard training/,$p' "$out/train.log"
[ -e "$out/sync.log" ] && grep -E '  (ms|MiB)  ' "$out/sync.log"
[ -e "$out/gradients.log" ] && sed -n '/worst shapes/,$p' "$out/gradients.log" | grep -v 'it/s'
[ -e "$out/clients.log" ] && sed -n '/^clients, /,$p' "$out/clients.log"
grep -hE '^(FAILED|SKIPPED) ' "$out"/{kernels,linear,train,sync,gradients,clients}.log 2>/dev/null
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
