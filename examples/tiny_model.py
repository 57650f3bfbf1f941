"""Random models that need no download: Qwen2 in two sizes, and a sliding-window Gemma 3.

Covers the weights, the configuration and a byte-level tokenizer (one token per UTF-8 byte, so the
length of a prompt in tokens is the length of its text in bytes). Does not cover serving. Runs in
the caller's process; ``python examples/tiny_model.py DIR`` does the same from a shell.

The weights are random, but not careless: attention is made sharp (otherwise every head averages
over the whole context, and an output hardly depends on the KV cache that it is a witness of), and
only printable ASCII can win the arg-max (otherwise a stream holds back halves of characters, and
the time to the first token cannot be seen from outside).

vLLM runs a float32 model in bfloat16 unless it is launched with ``dtype=float32``.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: Token ids: one per byte, then the special tokens.
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Standard deviation of the attention scores before the soft-max. At 3 a query looks at a few
#: tokens; at the usual initialisation it is 0.2 and it looks at all of them.
SCORE_STD = 3.0

#: ``demo``: 30M parameters; a block of 32 tokens is 589,824 bytes over all layers in float32.
#: ``bench``: 106M parameters; a block of 32 tokens is 589,824 bytes in bfloat16.
#: ``tiny``: 0.9M parameters for tests; a block of 32 tokens is 65,536 bytes in float32.
QWEN2_SIZES: dict[str, dict[str, int]] = {
    "demo": {
        "hidden_size": 384,
        "intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 96,
        "max_position_embeddings": 32768,
    },
    "bench": {
        "hidden_size": 576,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 32768,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32768,
    },
}


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token per byte and the three ChatML special tokens; no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def build(path: str | Path, *, size: str = "demo", dtype: str = "float32", seed: int = 0) -> Path:
    """Write a random Qwen2 model and its tokenizer to ``path``; returns ``path``.

    ``size`` is a key of ``QWEN2_SIZES`` and ``dtype`` the name of a torch floating-point type. The
    same arguments give the same bytes. Replaces what an earlier call left at ``path``; raises
    ``FileExistsError`` when ``path`` holds something else, ``ValueError`` for an unknown size.
    """
    if size not in QWEN2_SIZES:
        raise ValueError(f"size={size!r}: expected one of {', '.join(QWEN2_SIZES)}")
    from transformers import Qwen2Config

    config = Qwen2Config(**QWEN2_SIZES[size], **_common_config())
    return _write(Path(path), config, dtype=dtype, seed=seed)


def build_gemma3(
    path: str | Path, *, sliding_window: int = 128, dtype: str = "float32", seed: int = 0
) -> Path:
    """Write a random Gemma 3 text model to ``path``: 5 sliding-window layers and 1 full one.

    vLLM splits its layers into 6 KV groups of one layer each when the hybrid KV cache manager is
    on. Arguments and errors as for ``build``.
    """
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=32768,
        sliding_window=sliding_window,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        **_common_config(tied=True),
    )
    return _write(Path(path), config, dtype=dtype, seed=seed)


def _common_config(*, tied: bool = False) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": VOCAB_SIZE - 1,
        "pad_token_id": 256,
    }


def _write(path: Path, config: Any, *, dtype: str, seed: int) -> Path:
    """Build into a neighbour folder and rename: an interrupted build never looks complete."""
    import torch

    _refuse_foreign_folder(path)
    tokenizer = byte_level_tokenizer()
    model = _empty_model(config, getattr(torch, dtype))
    _fill(model, torch.Generator().manual_seed(seed))
    _silence_unprintable(model, tokenizer)
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    return path


def _refuse_foreign_folder(path: Path) -> None:
    if path.exists() and any(path.iterdir()) and not (path / "model.safetensors").is_file():
        raise FileExistsError(f"{path} exists and holds no model of ours: name another folder")


def _empty_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model's structure with uninitialised weights: ``_fill`` decides every one of them."""
    import torch
    from transformers import AutoModelForCausalLM

    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    return model


def _fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every parameter, in name order, so that activations stay near unit variance."""
    import torch

    is_gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name:
                parameter.fill_(_norm_weight(name, is_gemma))
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * _std(name, parameter, is_gemma))


def _norm_weight(name: str, is_gemma: bool) -> float:
    """Gemma multiplies by ``1 + weight``, and its query norm sets how sharp attention is."""
    if not is_gemma:
        return 1.0
    return SCORE_STD - 1.0 if "q_norm" in name else 0.0


def _std(name: str, parameter: torch.Tensor, is_gemma: bool) -> float:
    fan_in = parameter.shape[-1]
    if "embed_tokens" in name:  # Gemma multiplies the embedding by sqrt(hidden) itself
        return fan_in**-0.5 if is_gemma else 1.0
    if not is_gemma and ("q_proj" in name or "k_proj" in name):
        return (SCORE_STD / fan_in) ** 0.5
    return fan_in**-0.5


def _silence_unprintable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Zero the output rows of all tokens but printable ASCII: the arg-max of a draw is above 0."""
    import torch

    printable = tokenizer.convert_tokens_to_ids([chr(c) for c in range(33, 127)])
    mask = torch.zeros(VOCAB_SIZE, 1)
    mask[printable] = 1
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(mask.to(head.dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small random model, without a download.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", default="demo", choices=[*QWEN2_SIZES, "gemma3"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.size == "gemma3":
        build_gemma3(args.path, dtype=args.dtype, seed=args.seed)
    else:
        build(args.path, size=args.size, dtype=args.dtype, seed=args.seed)
    print(args.path)


if __name__ == "__main__":
    main()
