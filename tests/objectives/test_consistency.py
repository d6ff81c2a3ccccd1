"""Records that contradict themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_loads import closed_loop, failed, record

from vopt.objectives.consistency import contradictions
from vopt.objectives.records import RequestFailureKind, RequestRecord


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (replace(record(), chunk_times_s=(0.3, 0.2), chunk_tokens=(5, 6)), "chunk times run backwards"),
        (replace(record(), ended_s=0.2), "ended before the last chunk"),
        (
            replace(record(sent_s=5), ended_s=4.0, chunk_times_s=(), chunk_tokens=(), output_tokens=0),
            "ended before it was sent",
        ),
        (replace(record(), sent_s=0.2), "a chunk came before the request was sent"),
        (replace(record(sent_s=5), scheduled_s=6.0), "sent before it was scheduled"),
        (replace(record(), ended_s=float("nan")), "a time is not a finite number"),
        (replace(record(), chunk_times_s=(0.1, float("inf"))), "a time is not a finite number"),
        (replace(record(), first_content_s=0.05), "first content before the first token"),
        (replace(record(), chunk_tokens=(1,) * 10), "11 chunk times but 10 chunk token counts"),
        (replace(record(), output_tokens=10), "chunks hold 11 tokens but 10 were counted"),
        (replace(record(), requested_output_tokens=5), "11 output tokens but only 5 were asked for"),
        (replace(record(), prompt_tokens=-1), "a negative token count"),
        (record(cached_prompt_tokens=101), "more cached prompt tokens than prompt tokens"),
        (record(output_tokens=0), "succeeded without output tokens"),
        (
            replace(record(), chunk_times_s=(), chunk_tokens=()),
            "succeeded with output tokens but without a chunk",
        ),
        (record(finish_reason=None), "succeeded with finish reason None"),
        (
            replace(failed(0, 1, RequestFailureKind.CONNECTION), censored=True),
            "both failed and censored",
        ),
    ],
)
def test_each_contradiction_is_named(broken: RequestRecord, words: str) -> None:
    assert words in contradictions(broken)


def test_consistent_records_have_none() -> None:
    assert not any(contradictions(each) for each in closed_loop(2, concurrency=8, window_s=20).records)
    assert not contradictions(failed(0, 1, RequestFailureKind.STREAM_ERROR))
    assert not contradictions(record(finish_reason="stop", requested_output_tokens=50))
