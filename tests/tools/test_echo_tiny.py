"""The bundled model in the engine: it looks up numbers, and where its rows are does not change a token."""

from dataclasses import replace
from functools import lru_cache

import pyarrow.parquet as pq
from tokenizers import Tokenizer

from echo_batch.cache.manager import OffloadedCache
from echo_batch.engine.plan import Plan
from echo_batch.models.model import Model
from echo_batch.request import Completion, Request, SamplingParams
from tests.engine.engines import make_core, run_all, tiny_plan, tokens_of
from tests.models.oracle import load_fp32
from tools.train_tiny.make_demo import DEFAULT_OUTPUT, SIZES, demo_rows
from tools.train_tiny.tasks import ANSWER_TOKENS, BUNDLED_MODEL, NUM_DIGITS, TaskName, load_generator

QUESTIONS: tuple[tuple[TaskName, int], ...] = (("kv", 800), ("passkey", 384))
"""Longer than index_topk, 256: a step selects some of what is cached."""
NUM_TOKENS = 20
HOST_TOKENS = 1280


@lru_cache(maxsize=1)
def the_model() -> Model:
    return load_fp32(BUNDLED_MODEL)


@lru_cache(maxsize=1)
def questions() -> tuple[tuple[Request, tuple[int, ...]], ...]:
    """Requests with the ids of their answers; generation goes on behind these, through more of the cache."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    generator = load_generator(seed=11)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    made = [generator.make(task, 0, tokens) for task, tokens in QUESTIONS]
    return tuple(
        (
            Request(row_id=row, prompt_token_ids=tokenizer.encode(m.prompt).ids, sampling=sampling),
            tuple(tokenizer.encode(m.answer, add_special_tokens=False).ids),
        )
        for row, m in enumerate(made)
    )


def answer(plan: Plan) -> tuple[dict[int, Completion], int, int]:
    """Completions, and the numbers of evicted and of prefetched rows, of a run with these pools."""
    core = make_core(the_model(), plan)
    completions = run_all(core, [request for request, _ in questions()])
    evicted = sum(core.cache.counters().evicted_rows)
    guessed = core.cache.prefetch_counters() if isinstance(core.cache, OffloadedCache) else None
    core.close()
    return completions, evicted, 0 if guessed is None else sum(guessed.prefetched)


@lru_cache(maxsize=1)
def without_offloading() -> dict[int, tuple[int, ...]]:
    return tokens_of(answer(tiny_plan(the_model(), host=HOST_TOKENS, seqs=2, offload=False))[0])


def test_it_looks_up_what_was_asked() -> None:
    tokens = without_offloading()
    for row, (request, expected) in enumerate(questions()):
        assert len(request.prompt_token_ids) > 1.2 * the_model().config.index_topk
        assert tokens[row][:NUM_DIGITS] == expected


def test_a_small_pool_and_prefetch_give_the_same_tokens() -> None:
    """The minimum pool: tests/test_demo_lossless.py."""
    plan = tiny_plan(the_model(), host=HOST_TOKENS, gpu=704, seqs=2)
    completions, evicted, prefetched = answer(replace(plan, cache=replace(plan.cache, prefetch="fused")))
    assert tokens_of(completions) == without_offloading()
    assert evicted > 0 and prefetched > 0


def test_the_demo_is_what_its_script_makes() -> None:
    rows = pq.read_table(DEFAULT_OUTPUT).to_pylist()
    assert rows == demo_rows()
    assert len(rows) == sum(count for _, count in SIZES) == 16
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    lengths = [tokens for tokens, count in SIZES for _ in range(count)]
    for row, tokens in zip(rows, lengths, strict=True):
        assert tokens - 400 < len(tokenizer.encode(row["prompt"]).ids) + ANSWER_TOKENS <= tokens
    assert sorted(r["id"].split("-")[0] for r in rows) == ["kv"] * 8 + ["passkey"] * 8
