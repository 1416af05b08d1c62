"""The Qwen2.5-family decoder, made of precision-aware layers, and its Hugging Face weights."""
