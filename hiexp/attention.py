"""`varlen`: attention over sequences that lie end to end, for transformers models, without padding and without a mask.

On CUDA torch's own variable-length flash kernel (no flash-attn wheel needed), elsewhere one causal product per
sequence. `register` makes the name known to transformers; the boundaries come in the keyword arguments that its
flash-attention path takes too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "varlen"


def register() -> None:
    """Make `attn_implementation="varlen"` work; doing it again changes nothing."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def varlen_attention(
    module: nn.Module,
    query: Tensor,  # [R, heads, L, D]; R is 1 where boundaries are given
    key: Tensor,  # [R, key heads, L, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence [R, L, heads, D]; rows without boundaries are sequences of their own.

    ValueError for unequal query and key lengths: where a causal mask begins would then be a convention.
    """
    if query.shape[2] != key.shape[2] or attention_mask is not None:
        raise ValueError("varlen attention takes whole sequences: no cache and no mask")
    gqa = query.shape[1] != key.shape[1]
    if cu_seq_lens_q is None or max_length_q is None:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    elif query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        bounds: Any = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        out: Any = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0), enable_gqa=gqa)
        return out[None], None
    else:
        lengths = cu_seq_lens_q.diff().tolist()
        parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
        each = [scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=gqa) for part in parts]
        out = torch.cat(each, dim=2)
    return out.transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None
