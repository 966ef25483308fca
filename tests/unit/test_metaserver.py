"""D's posts to metaservers: real HTTP, and everything a metaserver may do instead of an answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from fakes.clock import wait_for
from fakes.http_server import FakeMetaserver, serving

from vllm_llmdd_connector.control.metaserver import MetaserverClient, check_metaserver
from vllm_llmdd_connector.deadlines import Deadlines
from vllm_llmdd_connector.errors import RemoteProtocolError

LOOPBACK = ("127.0.0.0/8",)


class Posts:
    """A client with the answers of its posts."""

    def __init__(self) -> None:
        self.client = MetaserverClient(Deadlines(first_contact_timeout_s=20.0))
        self.answers: dict[str, list[str]] = {}

    def post(self, url: str, key: str = "k", body: dict[str, object] | None = None) -> None:
        answers = self.answers.setdefault(key, [])
        self.client.post(key, url, body or {}, answers.append)

    def answer(self, key: str = "k") -> str:
        wait_for(lambda: self.answers[key], f"the answer to {key}")
        (answer,) = self.answers[key]
        return answer


@pytest.fixture
def posts() -> Iterator[Posts]:
    made = Posts()
    yield made
    made.client.close()


@pytest.fixture
def metaserver() -> Iterator[FakeMetaserver]:
    with serving() as fake:
        yield fake


class TestPost:
    def test_body_arrives_and_2xx_is_no_failure(
        self, posts: Posts, metaserver: FakeMetaserver
    ) -> None:
        posts.post(metaserver.url, body={"request_id": "cmpl-1-0", "remote_block_ids": [[]]})
        assert posts.answer() == ""
        assert metaserver.bodies == [{"request_id": "cmpl-1-0", "remote_block_ids": [[]]}]
        assert metaserver.paths == ["/v1/metaserver"]

    @pytest.mark.parametrize("status", [400, 404, 500, 502])
    def test_any_other_status_is_a_failure_that_names_it(
        self, posts: Posts, metaserver: FakeMetaserver, status: int
    ) -> None:
        metaserver.status = status
        posts.post(metaserver.url)
        assert posts.answer() == f"{metaserver.url} answered {status}"

    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_a_redirect_is_not_followed(
        self, posts: Posts, metaserver: FakeMetaserver, status: int
    ) -> None:
        """The address it names has passed no allow-list."""
        with serving() as elsewhere:
            metaserver.status = status
            metaserver.headers = {"Location": elsewhere.url}
            posts.post(metaserver.url)
            assert posts.answer() == f"{metaserver.url} answered {status}"
            assert elsewhere.bodies == []

    def test_a_metaserver_that_is_down_is_a_failure(self, posts: Posts) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        posts.post(f"http://127.0.0.1:{port}/")
        assert "cannot be asked" in posts.answer()

    def test_a_metaserver_that_speaks_no_http_is_a_failure(self, posts: Posts) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            posts.post(f"http://127.0.0.1:{server.getsockname()[1]}/")
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 smtp\r\n\r\n")
                assert "cannot be asked" in posts.answer()

    def test_no_proxy_of_the_environment_is_used(
        self, posts: Posts, metaserver: FakeMetaserver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serving() as proxy:
            monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
            monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{proxy.port}")
            posts.post(metaserver.url)
            assert posts.answer() == ""
            assert proxy.bodies == []

    def test_slow_answers_do_not_hold_back_others(
        self, posts: Posts, metaserver: FakeMetaserver
    ) -> None:
        metaserver.hold = True
        for number in range(20):
            posts.post(metaserver.url, key=f"slow {number}")
        wait_for(lambda: len(metaserver.bodies) == 20, "all posts")
        with serving() as other:
            posts.post(other.url)
            assert posts.answer() == ""
        metaserver.release.set()
        assert [posts.answer(f"slow {number}") for number in range(20)] == [""] * 20


class TestEnd:
    def test_a_cancelled_post_is_closed_and_not_answered(
        self, posts: Posts, metaserver: FakeMetaserver
    ) -> None:
        metaserver.hold = True
        posts.post(metaserver.url)
        wait_for(lambda: metaserver.bodies, "the post")
        posts.client.cancel("k")
        wait_for(lambda: metaserver.num_left == 1, "the end of the connection")
        assert posts.answers == {"k": []}

    def test_cancelling_what_is_over_or_unknown_does_nothing(
        self, posts: Posts, metaserver: FakeMetaserver
    ) -> None:
        posts.post(metaserver.url)
        posts.answer()
        for key in ("k", "k", "never seen"):
            posts.client.cancel(key)
        posts.post(metaserver.url, key="next")
        assert posts.answer("next") == ""

    def test_close_ends_open_posts_and_takes_no_more(
        self, posts: Posts, metaserver: FakeMetaserver
    ) -> None:
        metaserver.hold = True
        posts.post(metaserver.url)
        wait_for(lambda: metaserver.bodies, "the post")
        posts.client.close()
        wait_for(lambda: metaserver.num_left == 1, "the end of the connection")
        posts.post(metaserver.url, key="late")
        posts.client.close()
        assert posts.answers == {"k": [], "late": []}


class TestCheck:
    @pytest.mark.parametrize(
        "url", ["http://127.0.0.1:8000/v1/metaserver", "https://127.9.9.9/x", "HTTP://127.0.0.1"]
    )
    def test_http_to_an_allowed_address_passes(self, url: str) -> None:
        check_metaserver(url, LOOPBACK)

    @pytest.mark.parametrize(
        ("url", "told"),
        [
            ("http://10.0.0.1:80/", "'10.0.0.1' is not an IPv4 address in allowed_peers"),
            ("http://localhost:80/", "'localhost' is not an IPv4 address"),
            ("http://127.1:80/", "'127.1' is not an IPv4 address"),
            ("http://[::1]/", "'::1' is not an IPv4 address"),
            ("http:///x", "None is not an IPv4 address"),
            ("file:///etc/passwd", "not a plain http or https URL"),
            ("ftp://127.0.0.1/", "not a plain http or https URL"),
            ("http://user:word@127.0.0.1/", "not a plain http or https URL"),
            ("127.0.0.1:80", "not a plain http or https URL"),
            ("http://127.0.0.1:99999/", "is not a URL"),
            ("http://[::1", "is not a URL"),
        ],
    )
    def test_anything_else_is_refused_by_name(self, url: str, told: str) -> None:
        with pytest.raises(RemoteProtocolError) as refusal:
            check_metaserver(url, LOOPBACK)
        assert told in str(refusal.value)
