"""`python -m tests.vllm.generate DIRECTORY`: a tiny Qwen2-VL answers about images, before and after its
encoder is captured.

Prints a line of JSON: the tokens of both, and what the manager counted. The worker of a CPU makes no manager
of encoder CUDA graphs, so this makes it by the runner's own method, and the runner's own code calls it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm_cpu import use_padded_attention

from tests.vllm import conftest  # noqa: F401

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
PADS = ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = [f"word{number}" for number in range(120)]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SIZES = [(56, 56), (84, 56), (112, 84), (56, 140)]
"""Pixels of four images."""


def save_model(directory: Path) -> None:
    """A checkpoint of random weights, large enough for images to change what is said, a tokenizer of words,
    and an image processor.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *PADS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], additional_special_tokens=[*SPECIAL[1:], *PADS]
    ).save_pretrained(directory)
    text = dict(
        **dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, vocab_size=len(vocabulary)),
        **dict(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024),
        **dict(bos_token_id=0, eos_token_id=0, pad_token_id=0, initializer_range=0.2),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    )
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=dict(depth=2, embed_dim=64, hidden_size=128, num_heads=2, mlp_ratio=2),
        tie_word_embeddings=False,
        **{f"{name}_token_id": vocabulary[f"<|{name}|>"] for name in ("vision_start", "vision_end")},
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(directory)
    processor = dict(
        image_processor_type="Qwen2VLImageProcessor",
        processor_class="Qwen2VLProcessor",
        size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
        **dict(patch_size=14, temporal_patch_size=2, merge_size=2),
    )
    video = {**processor, "video_processor_type": "Qwen2VLVideoProcessor"}
    for name, value in {"preprocessor_config": processor, "video_preprocessor_config": video}.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def prompts(seed: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    images = [Image.fromarray(draw.integers(0, 255, (h, w, 3), dtype=np.uint8)) for w, h in SIZES]
    texts = [f"word1 {IMAGE} word2", f"{IMAGE} word3 {IMAGE} word4", "word5 word6", f"word7 {IMAGE}"]
    taken = [images[:1], images[1:3], [], images[3:]]
    return [
        {"prompt": text.replace("><", "> <"), **({"multi_modal_data": {"image": own}} if own else {})}
        for text, own in zip(texts, taken, strict=True)
    ]


def main(directory: Path) -> None:
    # An engine in this process, which finds plugins by itself.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_PLUGINS", None)
    from vllm import LLM, SamplingParams

    use_padded_attention()
    torch.cuda.is_current_stream_capturing = lambda: False  # models ask, and a torch of a CPU has no answer
    save_model(directory)
    llm = LLM(
        str(directory),
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=256,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 2, "video": 0},
        kv_cache_memory_bytes=1 << 26,
        # So that images are encoded again, whatever was encoded before.
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        compilation_config={"cudagraph_mm_encoder": True},
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def tokens(seed: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts(seed), sampling)]

    before, others = tokens(0), tokens(1)
    runner._maybe_init_encoder_cudagraph_manager()
    manager = runner.encoder_cudagraph_manager
    manager.capture(graph_pool=None)
    result = {"before": before, "others": others, "after": tokens(0)}
    kind = type(manager).__mro__[1].__name__
    print(json.dumps({**result, "kind": kind, **manager.get_cumulative_stats()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
