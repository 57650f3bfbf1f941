#!/usr/bin/env bash
# Launch a model with the snapshot cache through Xinference's command line. A server must be running.
#
# Environment: XINFERENCE_ENDPOINT, XINFERENCE_API_KEY (when the server wants one), MODEL_UID,
# MODEL_PATH (a local folder; without it Xinference downloads the model), N_GPU ("None" for a
# machine without a GPU). Arguments are passed on: any option of `xinference launch` or vLLM.
set -euo pipefail

endpoint=${XINFERENCE_ENDPOINT:-http://127.0.0.1:9997}
model_uid=${MODEL_UID:-cached-qwen}

exec xinference launch --endpoint "$endpoint" \
    ${XINFERENCE_API_KEY:+--api-key "$XINFERENCE_API_KEY"} \
    --model-uid "$model_uid" \
    --model-name qwen2.5-instruct \
    --model-engine vllm \
    --size-in-billions 0_5 \
    --model-format pytorch \
    ${MODEL_PATH:+--model-path "$MODEL_PATH"} \
    --n-gpu "${N_GPU:-auto}" \
    --enable-xavier-gpu \
    --xavier-gpu-budget "${GPU_BUDGET:-256MiB}" \
    --xavier-cpu-budget "${CPU_BUDGET:-1GiB}" \
    "$@"
