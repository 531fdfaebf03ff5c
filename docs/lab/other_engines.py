"""Time greedy decoding here, in vLLM and in OpenVINO, with each engine's own Python.

    python docs/lab/other_engines.py prompts out/prompts.json
    python docs/lab/other_engines.py float32:eagle3 out/prompts.json
    python docs/lab/other_engines.py float32:int8 out/prompts.json
    VLLM/bin/python docs/lab/other_engines.py vllm:float32:out/vllm_eagle3 out/prompts.json
    OPENVINO/bin/python docs/lab/other_engines.py openvino:out/ov_int8 out/prompts.json

Set OMP_NUM_THREADS. The first command writes the eight turns of six prompts, and our float32 output
without a draft.
After our dtype, eagle3 means the head in this dtype. A dtype means the head rounded to this dtype.
out/vllm_eagle3 is assets/heads/smollm2_eagle3 in speculators' layout; docs/engines.md says how to
install vLLM, and eval/engine_parity.py which environment variables it needs. For OpenVINO: `pip
install openvino-genai==2026.4.1 optimum-intel nncf`, `pip uninstall torchvision`, and `optimum-cli
export openvino --model out/smollm2 --task text-generation-with-past --weight-format int8
out/ov_int8` (or fp32, or int4 with `--group-size 64`). llama_cpp.mjs is the same for llama.cpp.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

TARGET, HEAD, NEW_TOKENS = "out/smollm2", "assets/heads/smollm2_eagle3", 64
Decode = Callable[[list[int], int], list[int]]


def ours(dtype: str, draft: str | None) -> Decode:
    import pipedraft

    head = {} if draft is None else {"draft": HEAD}
    head |= {} if draft in (None, "eagle3") else {"draft_dtype": draft}
    model = pipedraft.load(TARGET, dtype=dtype, **head)
    way = {} if draft is None else {"schedule": "eagle", "tree": "chain:3"}
    return lambda ids, count: [
        token.id for token in model.generate(ids, stages=1, max_new_tokens=count, **way).tokens
    ]


def vllm(dtype: str, head: str | None) -> Decode:
    from vllm import LLM, SamplingParams

    draft = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    llm = LLM(
        TARGET,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**29,
        **({} if head is None else {"speculative_config": draft}),
    )

    def decode(ids: list[int], count: int) -> list[int]:
        settings = SamplingParams(temperature=0.0, max_tokens=count)
        found = llm.generate([{"prompt_token_ids": ids}], settings, use_tqdm=False)
        return [*found[0].outputs[0].token_ids]

    return decode


def openvino(folder: str, _: None) -> Decode:
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

    threads = int(os.environ["OMP_NUM_THREADS"])
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    model = genai.LLMPipeline(folder, "CPU", ATTENTION_BACKEND="SDPA", **settings)

    def decode(ids: list[int], count: int) -> list[int]:
        rows = np.array([ids], np.int64)
        config = genai.GenerationConfig(max_new_tokens=count, apply_chat_template=False)
        inputs = genai.TokenizedInputs(Tensor(rows), Tensor(np.ones_like(rows)))
        return [*model.generate(inputs, config).tokens[0]]

    return decode


def write_prompts(path: Path) -> None:
    from pipedraft.eval.tasks import encode_turn, load_tasks
    from pipedraft.models.target import load_tokenizer

    tokenizer, decode = load_tokenizer(TARGET), ours("float32", None)
    tasks = load_tasks(["mt_bench", "gsm8k", "humaneval"], None, 2)
    runs = []
    for prompt in [prompt for prompts in tasks.values() for prompt in prompts]:
        answers: list[str] = []
        for _ in prompt.turns:
            ids = [*map(int, encode_turn(tokenizer, prompt, answers))]
            runs.append((ids, decode(ids, NEW_TOKENS)))
            answers.append(tokenizer.decode(runs[-1][1], skip_special_tokens=True))
    path.write_text(json.dumps(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = "prompts, DTYPE[:DRAFT_DTYPE], vllm:DTYPE[:HEAD], openvino:FOLDER"
    parser.add_argument("way", help=ways)
    parser.add_argument("prompts", type=Path, help="JSON file: written by the way prompts")
    options = parser.parse_args()
    way, path = options.way, options.prompts
    if way == "prompts":
        write_prompts(path)
        return
    makers = {"vllm": vllm, "openvino": openvino}
    name, _, rest = way.partition(":")
    make = makers.get(name, ours)
    first, _, second = (rest if name in makers else way).partition(":")
    decode, runs = make(first, second or None), json.loads(path.read_text())
    decode(runs[0][0], 8)
    start = time.perf_counter()
    found = [decode(ids, NEW_TOKENS) for ids, _ in runs]
    seconds, tokens = time.perf_counter() - start, sum(map(len, found))
    equal = sum(out == expected for out, (_, expected) in zip(found, runs, strict=True))
    print(f"{way}: {tokens / seconds:.1f} tokens/s, {equal}/{len(runs)} outputs equal", flush=True)


if __name__ == "__main__":
    main()
