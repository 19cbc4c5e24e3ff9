"""A whole-sequence forward pass over Model's methods: prefill without engine or cache, for tests."""

import torch
from torch import Tensor

from echo_batch.models.model import Model


def reference_forward(model: Model, token_ids: Tensor, selections: dict[int, Tensor] | None = None) -> Tensor:
    """Logits fp32 [S, V] of one sequence, token_ids int [S]. `selections` collects each full layer's top-k [S, k]."""
    num_tokens = token_ids.shape[0]
    positions = torch.arange(num_tokens, dtype=torch.int32, device=token_ids.device)
    ops, config = model.ops, model.config
    stream = model.embed(token_ids)
    selected: Tensor | None = None
    for layer in range(config.num_layers):
        stream, inputs = model.attention_inputs(layer, stream, model.angles(positions))
        if inputs.index_query is not None:
            assert inputs.index_weights is not None and inputs.index_key is not None
            scores = ops.index_scores_contiguous(
                inputs.index_query, inputs.index_weights, inputs.index_key, positions + 1, model.index_format
            )
            selected, _ = ops.topk_positions(scores, positions + 1, config.index_topk)
            if selections is not None:
                selections[layer] = selected
        assert selected is not None
        latent = ops.sparse_mla(inputs.query, inputs.kv_row, selected, config.softmax_scale, model.row_format)
        stream = model.attention_output(layer, stream, latent)
        stream = model.ffn(layer, stream)
    return model.logits(stream)
