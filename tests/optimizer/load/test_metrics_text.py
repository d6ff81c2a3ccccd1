from __future__ import annotations

import statistics

import pytest

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.materialise import materialise
from vopt.optimizer.load.metrics_text import from_histograms, parse
from vopt.optimizer.load.sharing import shared_prefix_tokens
from vopt.optimizer.load.text import TextTokenizer

BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def histogram(name: str, lengths: list[int], engine: str = "0") -> list[str]:
    labels = f'engine="{engine}",model_name="a \\"b\\" \\\\ c"'
    rows = [f'{name}_bucket{{le="{bound}.0",{labels}}} {sum(n <= bound for n in lengths)}.0' for bound in BOUNDS]
    return [
        f"# HELP {name} Lengths.",
        f"# TYPE {name} histogram",
        *rows,
        f'{name}_bucket{{le="+Inf",{labels}}} {len(lengths)}.0',
        f"{name}_count{{{labels}}} {len(lengths)}.0",
        f"{name}_sum{{{labels}}} {float(sum(lengths))}",
    ]


def scrape(prompts: list[int], outputs: list[int], hits: int = 0, engine: str = "0", running: float = 3) -> str:
    return "\n".join(
        [
            *histogram("vllm:request_prompt_tokens", prompts, engine),
            *histogram("vllm:request_generation_tokens", outputs, engine),
            *histogram("vllm:request_params_max_tokens", [2 * n for n in outputs], engine),
            f'vllm:prefix_cache_queries_total{{engine="{engine}"}} {float(sum(prompts))}',
            f'vllm:prefix_cache_hits_total{{engine="{engine}"}} {float(hits)}',
            f'vllm:num_requests_running{{engine="{engine}"}} {running}',
            f'vllm:num_requests_waiting{{engine="{engine}"}} 1.0 1700000000000',
            "",
        ]
    )


OLD = [100] * 50
PROMPTS = [40 + 5 * i for i in range(200)]
OUTPUTS = [10 + 2 * i for i in range(200)]


def test_the_format_is_read_with_escapes_and_time_stamps() -> None:
    found = parse('# TYPE a counter\na{x="1,2",y="q\\"u\\\\o\\nte"} 3e2 1700\nb 1\nnonsense line here\nc +Inf\n')
    assert found["a"] == {frozenset({("x", "1,2"), ("y", 'q"u\\o\nte')}): 300.0}
    assert found["b"] == {frozenset(): 1.0}
    assert found["c"][frozenset()] == float("inf")
    assert set(found) == {"a", "b", "c"}


def test_lengths_and_rate_come_from_the_difference_of_two_scrapes() -> None:
    before, after = parse(scrape(OLD, OLD)), parse(scrape(OLD + PROMPTS, OLD + OUTPUTS, running=5))
    traffic = from_histograms(before, after, seconds=100)
    assert traffic.requests == 200
    assert traffic.requests_per_s == pytest.approx(2)
    assert (traffic.running, traffic.waiting) == (4, 1)
    facts = traffic.workload.facts()
    assert facts["mean_prompt_tokens"] == pytest.approx(statistics.mean(PROMPTS), rel=0.05)
    assert facts["mean_output_tokens"] == pytest.approx(statistics.mean(OUTPUTS), rel=0.05)
    assert traffic.workload.reuse.share == 0
    assert any("clients allowed 418 output tokens" in note for note in traffic.notes)


def test_engines_of_one_server_are_added_up() -> None:
    before = parse("")
    after = parse(scrape(PROMPTS, OUTPUTS, engine="0") + scrape(PROMPTS, OUTPUTS, engine="1"))
    assert from_histograms(before, after, seconds=10).requests == 400


def test_prefix_hits_become_a_shared_beginning_as_far_as_the_prompts_allow(tokenizer: TextTokenizer) -> None:
    long = [900 + i for i in range(200)]
    traffic = from_histograms(parse(""), parse(scrape(long, OUTPUTS, hits=int(0.5 * sum(long)))), seconds=10)
    assert any("served 50% of the prompt tokens" in note for note in traffic.notes)
    assert traffic.workload.reuse.prefix_tokens == pytest.approx(500, abs=30)
    short = from_histograms(parse(""), parse(scrape([9] * 200, OUTPUTS, hits=900)), seconds=10)
    assert short.workload.reuse.share < 0.2
    mixed = [10 + 40 * (i % 50) for i in range(200)]  # one short prompt does not take the beginning from all others
    found = from_histograms(parse(""), parse(scrape(mixed, OUTPUTS, hits=int(0.33 * sum(mixed)))), seconds=10).workload
    assert found.reuse.share == pytest.approx(0.33, abs=0.01)
    made = materialise(found, tokenizer, seed=0, vocab=1500, max_model_len=4096).source
    prompts = [made.request(index).prompt_token_ids for index in range(128)]
    assert len(set(prompts)) == 128
    seen = sum(shared_prefix_tokens(prompts).seen_before) / sum(map(len, prompts))
    assert seen == pytest.approx(0.33, abs=0.03), "whole blocks of 16"


@pytest.mark.parametrize(("before", "after"), [(scrape(OLD, OLD), scrape(OLD, OLD)), ("", "other_metric 3\n")])
def test_no_traffic_is_an_error(before: str, after: str) -> None:
    with pytest.raises(UsageError, match="no request finished"):
        from_histograms(parse(before), parse(after), seconds=5)


def test_a_restart_between_the_scrapes_is_an_error() -> None:
    with pytest.raises(UsageError, match="backwards"):
        from_histograms(parse(scrape(PROMPTS, OUTPUTS)), parse(scrape(OLD, OLD)), seconds=5)
