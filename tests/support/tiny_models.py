"""Model directories small enough for a CPU: a configuration and a tokenizer, no weights (``load_format=dummy``).

    python tests/support/tiny_models.py DIRECTORY

writes ``tiny-qwen3`` (dense) and ``tiny-qwen3.5`` (hybrid: gated delta net and full attention) below DIRECTORY. The fields
are those of the published Qwen3 and Qwen3.5 configurations; every size is shrunk. The tokenizer is a byte-level BPE that is
trained on the interpreter's own documentation, so its text is natural and nothing is downloaded.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY = 1100
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def dense_config(*, layers: int = 4, positions: int = 4096) -> dict[str, Any]:
    """A Qwen3 of about 3 million parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def hybrid_config(*, layers: int = 4) -> dict[str, Any]:
    """A Qwen3.5 with three gated-delta-net layers for each full-attention layer, one MTP layer, and a token vision tower."""
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    }
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention" if (index + 1) % 4 else "full_attention" for index in range(layers)],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "partial_rotary_factor": 0.25,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 256,
        "num_position_embeddings": 2304,
        "initializer_range": 0.02,
        "deepstack_visual_indexes": [],
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": SPECIAL.index("<|image_pad|>"),
        "video_token_id": SPECIAL.index("<|video_pad|>"),
        "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
        "tie_word_embeddings": False,
    }


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 76,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 262_144,
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_processors(directory: Path) -> None:
    """What a multimodal architecture reads even when only text is served."""
    half = [0.5, 0.5, 0.5]
    shared = {"processor_class": "Qwen3VLProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    shared |= {"image_mean": half, "image_std": half}
    image = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4_096, "longest_edge": 25_165_824}}
    _write(directory / "preprocessor_config.json", shared | image)
    _write(directory / "video_preprocessor_config.json", shared | video)


def write_model(directory: Path, config: dict[str, Any]) -> Path:
    """One model directory; returned for chaining."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "config.json", config)
    write_tokenizer(directory)
    if "vision_config" in config:
        write_processors(directory)
    return directory


def write_tiny_models(root: Path) -> tuple[Path, Path]:
    """(dense, hybrid) model directories below ``root``."""
    return write_model(root / "tiny-qwen3", dense_config()), write_model(root / "tiny-qwen3.5", hybrid_config())


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/support/tiny_models.py DIRECTORY")
    for written in write_tiny_models(Path(sys.argv[1])):
        print(written)
