"""Questions over HTTP: the official client, the manifest's answer, and a server as a judge."""

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import openai
import pytest
from fake_service import server_of, until
from starlette.testclient import TestClient

from hyimg_cli.engine.service import Service
from hyimg_cli.manifest.chat import turn_of
from hyimg_cli.models.hunyuan_image3.answer import AnswerScript
from hyimg_cli.models.protocols import Answer
from hyimg_cli.scoring.judge import judge
from hyimg_cli.scoring.scorers import scorers_of
from hyimg_cli.serve.app import HttpServer
from hyimg_cli.serve.chat import chunks
from hyimg_cli.serve.online import OnlineRun
from hyimg_cli.settings.run import BatchConfig, CandidatesConfig, OutputConfig, RunConfig
from hyimg_cli.settings.values import BadValue

QUESTION = "what is in the picture?"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server with the embedded model."""
    folder = tmp_path_factory.mktemp("chat")
    config = RunConfig(batch=BatchConfig(max_size=4, prewarm=False), output=OutputConfig(folder))
    server = server_of(Service(config), folder / "state")
    with TestClient(server.app, base_url="http://127.0.0.1") as client:
        until(lambda: server.is_ready, 60)
        yield client


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    url = "http://127.0.0.1/v1"
    return openai.OpenAI(
        base_url=url, api_key="none", http_client=http, _strict_response_validation=True
    )


def content(picture: Path, text: str = QUESTION) -> list[Any]:
    url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]


def test_the_official_client_gets_the_manifests_answer(
    client: openai.OpenAI, write_picture: Any, run_cli: Any, tmp_path: Path
) -> None:
    picture = write_picture()
    line = {"custom_id": "q", "task": "i2t", "images": [picture.name], "prompt": QUESTION}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(line | {"max_new_tokens": 9}))
    assert run_cli("generate", "jobs.jsonl", "-o", "out").code == 0
    expected = json.loads((tmp_path / "out/results.jsonl").read_text())
    user: Any = {"role": "user", "content": content(picture)}
    found = client.chat.completions.create(
        model="tiny-image", messages=[user], max_tokens=9, temperature=0, top_p=1
    )
    assert found.choices[0].message.content == expected["answer"]
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.completion_tokens == 9
    warnings = found.to_dict()["hyimg"]["warnings"]  # type: ignore[index]
    assert "tiny-image is a toy that was not taught to answer questions" in warnings
    text = client.chat.completions.create(
        model="tiny-image",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        max_tokens=4,
    )
    assert text.choices[0].message.content


@pytest.mark.parametrize("bot_task", ["none", "think"])
def test_a_stream_is_the_answer_as_it_is_written(
    client: openai.OpenAI, write_picture: Any, monkeypatch: pytest.MonkeyPatch, bot_task: str
) -> None:
    """A token at a time; what is thought is not part of it."""
    told, step = list[str](), OnlineRun.add

    def heard(self: OnlineRun, event: Any) -> None:
        step(self, event)
        told.append(getattr(event, "answer", ""))

    monkeypatch.setattr(OnlineRun, "add", heard)
    asked: Any = {"model": "tiny-image", "max_tokens": 40, "extra_body": {"bot_task": bot_task}}
    asked["messages"] = [{"role": "user", "content": content(write_picture())}]
    stream = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **asked
    )
    (first, *parts, end, usage) = stream
    assert first.choices[0].delta.role == "assistant"
    assert all(one.choices[0].finish_reason is None for one in parts)
    said = [one.choices[0].delta.content or "" for one in parts]
    written = [*dict.fromkeys(filter(None, told))]
    assert len(written) > 5
    assert all(b.startswith(a) for a, b in pairwise(written))
    assert all(said)
    whole = client.chat.completions.create(**asked)
    assert "".join(said) == whole.choices[0].message.content == written[-1]
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason
    assert end.to_dict()["hyimg"]["warnings"] == whole.to_dict()["hyimg"]["warnings"]  # type: ignore[index]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert usage.usage.prompt_tokens > 40
    thought = whole.to_dict()["hyimg"].get("thought")  # type: ignore[attr-defined]
    assert bool(thought) == (bot_task == "think")


def test_chunks_come_before_the_end_and_an_error_ends_them() -> None:
    """A job that begins again is waited for; one that comes out differently is an error."""

    async def read(*steps: Any) -> list[dict[str, Any]]:
        run = Told()
        found = chunks(cast(Any, run), "", has_usage=False)
        lines = [await anext(found)]
        for step in steps:
            step(run)
            lines += [await anext(found)]
        lines += [one async for one in found]
        return [json.loads(one[6:]) for one in lines if one != b"data: [DONE]\n\n"]

    def ended(run: Told) -> None:
        run.entries["q"] = {}
        run.tell("red c")

    def anew(run: Told) -> None:
        run.tell("r")
        ended(run)

    lines = asyncio.run(read(lambda run: run.tell("red"), lambda run: run.tell("red ci"), anew))
    deltas = [one["choices"][0]["delta"].get("content") for one in lines]
    assert deltas == ["", "red", " ci", "rcle", None]
    lines = asyncio.run(read(lambda run: run.tell("blue"), ended))
    assert lines[-1]["error"]["code"] == "output.rewritten"


class Told:
    """A run whose answer is `red circle`."""

    created, line, error = 1, {"x_model": "toy"}, None
    jobs: ClassVar = [SimpleNamespace(custom_id="q")]

    def __init__(self) -> None:
        self.said, self.entries = dict[str, str](), dict[str, Any]()
        self.news, self.work = asyncio.Event(), asyncio.Future[None]()

    def tell(self, text: str) -> None:
        self.said["q"] = text
        self.news.set()
        self.news = asyncio.Event()

    def body(self, base: str, names: list[str]) -> dict[str, Any]:
        choice = {"message": {"content": "red circle"}, "finish_reason": "stop"}
        return {"choices": [choice], "hyimg": {}}


def test_two_at_once_get_the_answers_of_each_alone(http: TestClient, write_picture: Any) -> None:
    picture = write_picture()

    def ask(text: str) -> str:
        body = {"messages": [{"role": "user", "content": content(picture, text)}], "max_tokens": 9}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    texts = ["what is in the picture?", "is it red, or is something else here?"]
    alone = [ask(text) for text in texts]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(ask, texts)] == alone
    assert alone[0] != alone[1]


def test_a_server_is_a_judge(
    tmp_path: Path, write_picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the words is its own: no toy was taught to write marks."""
    marks = Answer('{"follows": 7, "preserves": 9, "quality": 8, "reason": "red"}', (1,))
    monkeypatch.setattr(AnswerScript, "answer", lambda *_: marks)
    config = RunConfig(batch=BatchConfig(max_size=4, prewarm=False), output=OutputConfig(tmp_path))
    server = server_of(Service(config), tmp_path / "state")
    http, case = HttpServer(server), {"prompt": "paint it red", "sources": [], "result": ""}
    case["result"] = str(write_picture())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread = threading.Thread(target=lambda: http.run(sockets=[listener]))
        thread.start()
        try:
            until(lambda: http.started and server.is_ready, 60)
            given = CandidatesConfig(
                score=("judge:tiny-image",), judge_url=address, score_option=("judge.max_tokens=4",)
            )
            (scorer,) = scorers_of(given)
            both = [case, case | {"sources": [case["result"]]}]
            found = [*judge(both, dict(scorer.options))]
        finally:
            server.is_stopping = True
            thread.join(20)
    assert [one["value"] for one in found] == [7, 7]
    assert found[0]["parts"] == {"follows": 7, "preserves": 9, "quality": 8}
    assert {one["facts"]["model"] for one in found} == {"tiny-image"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"n": 2}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream": True, "logprobs": True}, "logprobs"),
        ({"tools": []}, "tools"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_a_question_cannot_have(http: TestClient, change: Any, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    answer = http.post("/v1/chat/completions", json=body | change)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


def test_a_pictures_address_is_not_fetched(http: TestClient) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/a.png"}}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "manifest.not-served"


def test_lines_of_a_batch(http: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    lines = [
        {"custom_id": f"q {n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(2)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = http.post("/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"})
    asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions"}
    batch = http.post("/v1/batches", json=asked | {"completion_window": "24h"}).json()
    until(lambda: http.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
    name = http.get(f"/v1/batches/{batch['id']}").json()["output_file_id"]
    answers = [json.loads(x) for x in http.get(f"/v1/files/{name}/content").text.splitlines()]
    said = {one["custom_id"]: one["response"]["body"]["choices"][0] for one in answers}
    assert said.keys() == {"q 0", "q 1"}
    assert said["q 0"] == said["q 1"]
    assert said["q 0"]["message"]["content"]


def test_a_turn_as_fields_of_a_line() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": content_of("a", "b")},
    ]
    body = {"messages": messages, "max_completion_tokens": 5, "seed": 3, "top_p": 0.5}
    assert turn_of(body) == {
        "prompt": "a\nb",
        "images": [{"url": "x"}],
        "system_prompt": "Be brief.",
        "max_new_tokens": 5,
    }
    assert turn_of(body | {"temperature": 1})["top_p"] == 0.5
    with pytest.raises(BadValue):
        turn_of({"messages": [*messages, {"role": "assistant", "content": "x"}]})


def content_of(*texts: str) -> list[Any]:
    parts: list[Any] = [{"type": "text", "text": text} for text in texts]
    return [parts[0], {"type": "image_url", "image_url": {"url": "x"}}, *parts[1:]]
