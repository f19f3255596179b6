"""What this package knows of Ascend NPUs and of vllm-ascend. Imports without torch_npu, CANN and vLLM."""
