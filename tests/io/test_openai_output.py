import pytest

from echo_batch.io.openai_output import OpenAIOutput

OK = {
    "row_id": 3,
    "generated_text": "hi",
    "reasoning_text": None,
    "finish_reason": "stop",
    "num_input_tokens": 10,
    "num_cached_tokens": 4,
    "num_generated_tokens": 2,
    "error_code": None,
    "error_message": None,
}
LOGPROBS = [
    {"token_id": 5, "logprob": -0.5, "top": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.0}]},
    {"token_id": 7, "logprob": float("-inf"), "top": []},
]


class Decoder:
    def decode(self, ids, skip_special_tokens=True):
        assert not skip_special_tokens
        return {5: "hé", 6: "ho", 7: "<eos>"}[ids[0]]


@pytest.fixture
def openai():
    return OpenAIOutput(run_id="run", model="glm", created=1700000000)


def test_a_chat_row(openai):
    assert openai.line({"custom_id": "c", "url": "/v1/chat/completions"}, OK) == {
        "id": "batch_req_run-3",
        "custom_id": "c",
        "response": {
            "status_code": 200,
            "request_id": "req_run-3",
            "body": {
                "id": "chatcmpl-run-3",
                "object": "chat.completion",
                "created": 1700000000,
                "model": "glm",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hi", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 10,
                    "completion_tokens": 2,
                    "total_tokens": 12,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
        "error": None,
    }


def test_a_completions_row_and_token_ids(openai):
    body = openai.line({"custom_id": "c", "url": "/v1/completions"}, {**OK, "generated_token_ids": [1, 2]})["response"][
        "body"
    ]
    assert (body["object"], body["id"]) == ("text_completion", "cmpl-run-3")
    assert body["choices"] == [
        {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop", "token_ids": [1, 2]}
    ]


def test_other_inputs_are_chat_when_they_have_messages(openai):
    chat = openai.line({"messages": [{"role": "user", "content": "x"}]}, {**OK, "reasoning_text": "hm"})
    assert chat["custom_id"] == "row-3"
    assert chat["response"]["body"]["choices"][0]["message"]["reasoning_content"] == "hm"
    assert openai.line({"prompt": "x", "messages": None}, OK)["response"]["body"]["object"] == "text_completion"


@pytest.mark.parametrize(
    "code, status, kind", [("too_long", 400, "invalid_request_error"), ("engine_failed", 500, "server_error")]
)
def test_a_failure_is_a_response_with_another_status(openai, code, status, kind):
    line = openai.line({"custom_id": None}, {**OK, "generated_text": None, "error_code": code, "error_message": "m"})
    assert line["custom_id"] is None and line["error"] is None
    assert line["response"]["status_code"] == status
    assert line["response"]["body"] == {"error": {"message": "m", "type": kind, "param": None, "code": code}}


def test_logprobs_of_both_kinds():
    openai = OpenAIOutput(run_id="r", model="m", created=1, tokenizer=Decoder())
    result = {**OK, "logprobs": LOGPROBS}
    chat = openai.line({"url": "/v1/chat/completions"}, result)["response"]["body"]["choices"][0]["logprobs"]
    assert chat["content"][0] == {
        "token": "hé",
        "logprob": -0.5,
        "bytes": [104, 195, 169],
        "top_logprobs": [
            {"token": "hé", "logprob": -0.5, "bytes": [104, 195, 169]},
            {"token": "ho", "logprob": -1.0, "bytes": [104, 111]},
        ],
    }
    assert chat["content"][1]["logprob"] == -9999.0
    text = openai.line({"url": "/v1/completions"}, result)["response"]["body"]["choices"][0]["logprobs"]
    assert text == {
        "tokens": ["hé", "<eos>"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"hé": -0.5, "ho": -1.0}, {}],
        "text_offset": [0, 2],
    }


def test_without_a_tokenizer_tokens_are_named_by_id(openai):
    line = openai.line({"url": "/v1/completions"}, {**OK, "generated_text": None, "logprobs": LOGPROBS})
    assert line["response"]["body"]["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:7"]
