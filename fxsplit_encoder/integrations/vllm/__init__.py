"""A plugin that vLLM loads (docs/vllm.md). Only functions that need vLLM import it."""
