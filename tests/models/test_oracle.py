"""Logits and greedy tokens against transformers in fp32 (spec section 9)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echo_batch.kernels.ops import reference_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model
from tests.checkpoints import FAMILIES, KINDS, Family, Kind
from tests.models.forward import reference_forward

CheckpointFixture = Callable[[Family, Kind], Path]
CONTEXT = 128


def load_fp32(path: Path) -> Model:
    # transformers hard-codes 1e-6 for the latent norms (spec section 3.1).
    config = ModelConfig.from_dir(path, latent_eps=1e-6)
    return load_model(
        config, path, device=torch.device("cpu"), dtype=torch.float32, row_kind="fp32", ops=reference_ops()
    )


def load_oracle(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(tiny_checkpoint: CheckpointFixture, family: Family, kind: Kind) -> None:
    directory = tiny_checkpoint(family, kind)
    model = load_fp32(directory / "model")
    oracle = load_oracle(directory / "oracle")
    ids = torch.randint(0, 512, (CONTEXT,), generator=torch.Generator().manual_seed(1))
    selections: dict[int, torch.Tensor] = {}
    oracle_selections: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(oracle.model.layers):
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(
                lambda _module, _inputs, result, i=i: oracle_selections.__setitem__(i, result[0])
            )
    with torch.no_grad():
        expected = oracle(ids[None], use_cache=False).logits[0]
    logits = reference_forward(model, ids, selections)

    assert CONTEXT > model.config.index_topk
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    # Logits alone could agree by luck of a weak indexer: the selected sets must be the same too.
    assert selections.keys() == oracle_selections.keys()
    for i, ours in selections.items():
        for position in range(CONTEXT):
            theirs = oracle_selections[i][position]
            assert set(ours[position].tolist()) - {-1} == {p for p in theirs.tolist() if 0 <= p <= position}


@pytest.mark.parametrize("family", ["glm52"])
def test_greedy_tokens_match_transformers(tiny_checkpoint: CheckpointFixture, family: Family) -> None:
    directory = tiny_checkpoint(family, "bf16")
    model = load_fp32(directory / "model")
    oracle = load_oracle(directory / "oracle")
    prompt = torch.randint(0, 512, (48,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = oracle.generate(prompt[None], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = prompt
    for _ in range(64):
        ids = torch.cat((ids, reference_forward(model, ids)[-1:].argmax(-1)))
    assert ids.tolist() == expected[0].tolist()
