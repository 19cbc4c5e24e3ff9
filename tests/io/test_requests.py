from dataclasses import replace
from typing import Any

import pytest

from echo_batch.config import InputConfig, RunConfig
from echo_batch.errors import ModelError, RowError
from echo_batch.io.chat import load_chat
from echo_batch.io.requests import PromptLimits, RequestBuilder, base_sampling, context_limit
from echo_batch.io.schema import Record
from echo_batch.io.tokenizer import Tokenizer, load_tokenizer
from echo_batch.request import Request, RowFailure, SamplingParams
from tests.tiny_tokenizer import SPECIAL, write_tokenizer

CHAT = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    assert found is not None
    return found


def builder(
    tokenizer: Tokenizer | None,
    *,
    limit: int = 1_000,
    vocab: int = 600,
    model_type: str = "deepseek_v32",
    kwargs: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    explicit: set[str] | None = None,
    generation: dict[str, Any] | None = None,
    is_openai: bool = False,
    **input_options: Any,
) -> RequestBuilder:
    config = RunConfig(
        input=InputConfig(**input_options),
        sampling=SamplingParams(**(sampling or {})),
        explicit_sampling=frozenset(explicit if explicit is not None else sampling or ()),
    )
    return RequestBuilder(
        config,
        tokenizer,
        load_chat(None, tokenizer=tokenizer, model_type=model_type, kwargs=kwargs),
        PromptLimits(context_tokens=limit, vocab_size=vocab),
        generation_config=generation,
        is_openai=is_openai,
    )


def build(made: RequestBuilder, **values: Any) -> Request:
    """The row alone and the row in a batch must be the same request."""
    record = Record(3, values)
    request = made.build(record)
    assert made.build_many([record]) == [request]
    assert request.row_id == 3
    return request


def failure(made: RequestBuilder, **values: Any) -> tuple[str, str]:
    record = Record(3, values)
    with pytest.raises(RowError) as error:
        made.build(record)
    assert made.build_many([record]) == [RowFailure(code=error.value.code, message=error.value.message)]
    return error.value.code, error.value.message


def test_text_gets_bos_and_chats_do_not(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer)
    text = build(made, prompt="hello world")
    assert list(text.prompt_token_ids) == [0, *tokenizer.encode("hello world")]
    chat = build(made, messages=CHAT)
    # <bos><User>hello world<Assistant></think>
    assert list(chat.prompt_token_ids) == [0, 2, *tokenizer.encode("hello world"), 3, 5]
    assert chat.thinking_end is None and chat.num_cut_tokens == 0
    ids = build(made, prompt_token_ids=[7, 8, 9])
    assert list(ids.prompt_token_ids) == [7, 8, 9]


def test_thinking_is_seen_at_the_end_of_the_prompt(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer, kwargs={"thinking": True})
    assert build(made, messages=CHAT).thinking_end == "</think>"
    assert build(made, prompt="hello <think>\n").thinking_end == "</think>"
    assert build(made, prompt="hello <think> x").thinking_end is None
    assert build(made, prompt_token_ids=[7, 4]).thinking_end == "</think>"
    assert build(made, prompt_token_ids=[4, 7]).thinking_end is None
    assert build(builder(None), prompt_token_ids=[7, 4]).thinking_end is None


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer)
    assert build(made, prompt="a\ud800") == build(made, prompt="a�")
    assert build(made, messages=[{"role": "user", "content": "\udfff"}]) == build(
        made, messages=[{"role": "user", "content": "�"}]
    )


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({}, "no_prompt"),
        ({"prompt": ""}, "empty_prompt"),
        ({"messages": []}, "empty_prompt"),
        ({"prompt_token_ids": []}, "empty_prompt"),
        ({"prompt_token_ids": [600]}, "bad_token"),
        ({"prompt_token_ids": [1, -1]}, "bad_token"),
        ({"prompt_token_ids": [1, 2**40]}, "bad_token"),
        ({"prompt_token_ids": [1, 2.0]}, "bad_token"),
        ({"prompt_token_ids": [1, None]}, "bad_token"),
        ({"prompt_token_ids": [1, True]}, "bad_token"),
        ({"prompt_token_ids": ["a"]}, "bad_token"),
        ({"prompt": "a", "temperature": -1}, "bad_params"),
        ({"prompt": "a", "max_tokens": 0}, "bad_params"),
        ({"prompt": "a", "top_p": 1.5}, "bad_params"),
        ({"prompt": "a", "temperature": float("inf")}, "bad_params"),
        ({"prompt": "a", "temperature": 10**400}, "bad_params"),
        ({"prompt": "a", "seed": -1}, "bad_params"),
        ({"prompt": "a", "top_k": 2**31}, "bad_params"),
        ({"prompt": "a", "stop": [""]}, "bad_params"),
        ({"prompt": "a", "stop_token_ids": [600]}, "bad_params"),
        ({"prompt": "a", "logprobs": 21}, "bad_params"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "tokenize_failed"),
        ({"prompt": "x " * 2_000}, "too_long"),
    ],
)
def test_failures(tokenizer: Tokenizer, values: dict[str, Any], code: str) -> None:
    assert failure(builder(tokenizer), **values)[0] == code


def test_messages_of_failures_say_what_to_change(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer)
    assert failure(made, prompt_token_ids=[1, 600])[1] == "token 1 is 600; ids must be from 0 to 599"
    message = failure(made, prompt_token_ids=[1] * 1_000)[1]
    assert "1000 tokens" in message and "limit is 1000" in message and "--too-long" in message


def test_a_tokenizer_larger_than_the_model(tokenizer: Tokenizer) -> None:
    assert failure(builder(tokenizer, vocab=100), prompt="hello world")[0] == "bad_token"


def test_without_a_tokenizer_or_template(tokenizer: Tokenizer) -> None:
    assert failure(builder(None), prompt="a")[0] == "tokenize_failed"
    assert failure(builder(None), messages=CHAT)[0] == "tokenize_failed"
    assert failure(builder(tokenizer, model_type="glm_moe_dsa"), messages=CHAT)[0] == "tokenize_failed"
    assert list(build(builder(None), prompt_token_ids=[1, 2]).prompt_token_ids) == [1, 2]


def test_stop_strings_need_a_tokenizer() -> None:
    code, message = failure(builder(None), prompt_token_ids=[1], stop="END")
    assert code == "bad_params" and "stop_token_ids" in message


def test_a_row_that_could_not_be_read_keeps_its_error(tokenizer: Tokenizer) -> None:
    error = RowFailure(code="bad_json", message="m")
    made = builder(tokenizer)
    assert made.build_many([Record(0, {}, error), Record(1, {"prompt": "a"})])[0] == error
    with pytest.raises(RowError, match="bad_json: m"):
        made.build(Record(0, {}, error))


def test_bad_rows_do_not_touch_good_ones(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder(tokenizer)
    good = [Record(0, {"prompt": "hello"}), Record(1, {"messages": CHAT}), Record(2, {"prompt_token_ids": [5]})]
    want = [made.build(record) for record in good]
    bad = [Record(3, {}), Record(4, {"prompt": ""}), Record(5, {"prompt_token_ids": [-1]})]
    results = made.build_many([bad[0], good[0], bad[1], good[1], good[2], bad[2]])
    assert [results[1], results[3], results[4]] == want
    assert [r.code for r in results if isinstance(r, RowFailure)] == ["no_prompt", "empty_prompt", "bad_token"]

    encode = Tokenizer.encode_batch

    def picky(self: Tokenizer, texts: list[str], **options: Any) -> list[list[int]]:
        if any("poison" in text for text in texts):
            raise RuntimeError("cannot")
        return encode(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", picky)
    results = made.build_many([good[0], Record(7, {"prompt": "poison"}), good[1]])
    assert [results[0], results[2]] == want[:2]
    assert results[1] == RowFailure(code="tokenize_failed", message="cannot")


def test_precedence(tokenizer: Tokenizer) -> None:
    generation = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 50, "eos_token_id": [1, 2]}
    made = builder(
        tokenizer, generation=generation, sampling={"temperature": 0.3, "min_p": 0.1}, explicit={"temperature"}
    )
    sampling = build(made, prompt="a").sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.3, 0.95, 20, 50)
    assert sampling.min_p == 0.0  # not asked for on purpose: built-in
    row = build(made, prompt="a", temperature=0.9, top_k=5, max_tokens=7).sampling
    assert (row.temperature, row.top_p, row.top_k, row.max_tokens) == (0.9, 0.95, 5, 7)
    # Asked for on purpose, also at the built-in value.
    assert (
        build(builder(tokenizer, generation=generation, sampling={"temperature": 1.0}), prompt="a").sampling.temperature
        == 1
    )


def test_generation_config() -> None:
    assert base_sampling(RunConfig(), None) == SamplingParams()
    assert base_sampling(RunConfig(), {"do_sample": False, "temperature": 0.7}).temperature == 0
    assert base_sampling(RunConfig(), {"do_sample": True, "top_k": None}) == SamplingParams()
    for broken in ({"temperature": -1}, {"top_p": "x"}, {"top_k": 1.5}):
        with pytest.raises(ModelError, match="generation_config"):
            base_sampling(RunConfig(), broken)


def test_max_tokens_is_clipped_to_the_context(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer, limit=100)
    ids = [7] * 90
    assert build(made, prompt_token_ids=ids).sampling.max_tokens == 10
    assert build(made, prompt_token_ids=ids, max_tokens=10).sampling.max_tokens == 10
    assert build(made, prompt_token_ids=ids, max_tokens=11).sampling.max_tokens == 10
    assert build(made, prompt_token_ids=ids, max_tokens=9).sampling.max_tokens == 9
    assert build(made, prompt_token_ids=[7] * 99).sampling.max_tokens == 1
    assert failure(made, prompt_token_ids=[7] * 100)[0] == "too_long"


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("cut-head", list(range(130, 210))),
        ("cut-tail", list(range(10, 90))),
        ("cut-middle", [*range(10, 50), *range(170, 210)]),
    ],
)
def test_cutting(tokenizer: Tokenizer, policy: Any, kept: list[int]) -> None:
    made = builder(tokenizer, limit=100, too_long=policy, sampling={"max_tokens": 20})
    request = build(made, prompt_token_ids=list(range(10, 210)))
    assert list(request.prompt_token_ids) == kept and request.num_cut_tokens == 120
    assert request.sampling.max_tokens == 20
    with_bos = build(made, prompt_token_ids=[0, *range(10, 210)])
    assert len(with_bos.prompt_token_ids) == 80 and with_bos.prompt_token_ids[0] == 0
    assert list(with_bos.prompt_token_ids[1:]) != kept and with_bos.num_cut_tokens == 121
    # Only what is too long is cut.
    assert build(made, prompt_token_ids=[7] * 99).num_cut_tokens == 0


def test_room_left_by_cutting(tokenizer: Tokenizer) -> None:
    def size(**sampling: Any) -> tuple[int, int | None]:
        request = build(
            builder(tokenizer, limit=100, too_long="cut-head", sampling=sampling), prompt_token_ids=[7] * 300
        )
        return len(request.prompt_token_ids), request.sampling.max_tokens

    assert size(max_tokens=1) == (99, 1)
    assert size(max_tokens=500) == (50, 50)  # at most half the context goes to generation
    assert size() == (88, 12)  # an eighth, when nothing says how much


@pytest.mark.parametrize("policy", ["cut-head", "cut-middle", "cut-tail"])
def test_chats_keep_bos_and_the_opened_turn(tokenizer: Tokenizer, policy: Any) -> None:
    made = builder(tokenizer, limit=60, too_long=policy, kwargs={"thinking": True}, sampling={"max_tokens": 10})
    request = build(made, messages=[{"role": "user", "content": "hello world " * 100}])
    ids = list(request.prompt_token_ids)
    assert len(ids) == 50 and request.num_cut_tokens > 100
    assert ids[0] == 0 and ids[-2:] == [3, 4] and request.thinking_end == "</think>"
    assert (ids[1] == 2) == (policy != "cut-head")


def test_cutting_the_tail_of_a_text_closes_its_thinking(tokenizer: Tokenizer) -> None:
    text = "hello " * 200 + "<think>"
    made = {p: builder(tokenizer, limit=60, too_long=p) for p in ("cut-head", "cut-tail")}
    assert build(made["cut-head"], prompt=text).thinking_end == "</think>"
    assert build(made["cut-tail"], prompt=text).thinking_end is None


def test_a_limit_that_leaves_nothing(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer, limit=4, too_long="cut-middle", sampling={"max_tokens": 1})
    assert failure(made, messages=CHAT)[0] == "too_long"


def test_openai_rows(tokenizer: Tokenizer) -> None:
    made = builder(tokenizer, is_openai=True)
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 3}}
    assert build(made, **row) == replace(build(builder(tokenizer), prompt="hello", max_tokens=3))
    chat = row | {"url": "/v1/chat/completions", "body": {"messages": CHAT, "chat_template_kwargs": {"thinking": True}}}
    assert build(made, **chat).thinking_end == "</think>"
    assert failure(made, **(row | {"body": {"prompt": "x", "n": 2}}))[0] == "unsupported_param"
    assert failure(made, prompt="x")[0] == "bad_params"


def test_context_limit() -> None:
    assert context_limit(max_model_len=None, max_position=100) == 100
    assert context_limit(max_model_len=50, max_position=100, host_tokens=64) == 50
    assert context_limit(max_model_len=None, max_position=100, host_tokens=64) == 64


def test_texts_far_too_long_are_not_tokenized_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    encode = Tokenizer.encode_batch

    def watched(self: Tokenizer, texts: list[str], **options: Any) -> list[list[int]]:
        nonlocal longest
        longest = max(longest, *map(len, texts), 0)
        return encode(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    made = builder(tokenizer)
    code, message = failure(made, prompt="hello " * 1_000_000)
    assert code == "too_long" and "more than" in message and longest < 20_000
    # Few tokens for so many characters: only the whole text can tell.
    monkeypatch.setattr("echo_batch.io.requests._CHARACTERS_PER_TOKEN", 4)
    assert len(build(made, prompt=SPECIAL[0] * 998).prompt_token_ids) == 998
    assert longest > 20_000
    request = build(builder(tokenizer, too_long="cut-head"), prompt="hello " * 10_000)
    assert len(request.prompt_token_ids) + request.num_cut_tokens == 1 + len(tokenizer.encode("hello " * 10_000))
