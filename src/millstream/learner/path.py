"""Which way a learner computes, in words: it follows from the model, its device and the config."""

from __future__ import annotations

from transformers import PreTrainedModel

from millstream.learner.config import LearnerConfig
from millstream.model.attention import why_padded
from millstream.types import ComputePath


def learner_path(model: PreTrainedModel, config: LearnerConfig, device: str) -> ComputePath:
    """`device`: "cpu" or "cuda", where the learner is; the model may be elsewhere."""
    text = model.config.get_text_config()
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    padded = why_padded(device, model.dtype, getattr(text, "attn_logit_softcapping", None), dim)
    names = ["packed rows", "padded attention" if padded else "ragged attention"]
    names.append("compiled layers" if config.is_compiled else "layers not compiled")
    if device != "cuda":  # there is no faster one
        return ComputePath(", ".join(names))
    why = [padded, "" if config.is_compiled else "learner.compile = false"]
    return ComputePath(", ".join(names), "; ".join(filter(None, why)))
