from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.lengths import BLOCK, Lengths, Marginal
from vopt.optimizer.load.materialise import materialise
from vopt.optimizer.load.sessions import SessionShape, with_history
from vopt.optimizer.load.sharing import shared_prefix_tokens
from vopt.optimizer.load.source import HEADER_DIGITS, RequestSource
from vopt.optimizer.load.text import TextTokenizer
from vopt.optimizer.load.workload import CHAT, NAMED, Recorded, Reuse, Workload, named, prefix_repetition

SMALL = Workload("small", Lengths(Marginal(60, 0.5, 20, 200), Marginal(20, 0.5, 4, 60)))
TALK = replace(SMALL, sessions=SessionShape(turns=4, think_s=3, system_tokens=32))


def make(workload: Workload, tokenizer: TextTokenizer | None, seed: int = 0, *, replay: bool = False) -> RequestSource:
    return materialise(workload, tokenizer, seed=seed, vocab=1600, max_model_len=4096, replay=replay).source


def test_the_same_seed_gives_the_same_requests(tokenizer: TextTokenizer) -> None:
    assert make(SMALL, tokenizer, 5) == make(SMALL, tokenizer, 5)
    assert make(SMALL, tokenizer, 5).request(0).prompt_sha256 != make(SMALL, tokenizer, 6).request(0).prompt_sha256


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_every_block_of_64_requests_holds_the_same_lengths(tokenizer: TextTokenizer, with_tokenizer: bool) -> None:
    source = make(SMALL, tokenizer if with_tokenizer else None)
    for start in range(0, 5 * BLOCK, BLOCK):
        block = [source.request(start + i) for i in range(BLOCK)]
        assert Counter((r.prompt_tokens, r.max_tokens) for r in block) == Counter(SMALL.lengths.block())
        assert all(len(request.prompt_token_ids) == request.prompt_tokens for request in block)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_prompts_never_share_a_cache_block(tokenizer: TextTokenizer, with_tokenizer: bool) -> None:
    source = make(SMALL, tokenizer if with_tokenizer else None)
    first_blocks = [source.request(index).prompt_token_ids[:HEADER_DIGITS] for index in range(3000)]
    assert len(set(first_blocks)) == 3000


def test_other_numbers_make_other_prompts(tokenizer: TextTokenizer) -> None:
    source = make(SMALL, tokenizer)
    later = replace(source, first_number=1_000_000)
    assert not {source.request(i).prompt_sha256 for i in range(200)} & {later.request(i).prompt_sha256 for i in range(200)}


def test_text_is_natural_and_free_of_special_ids(tokenizer: TextTokenizer) -> None:
    made = materialise(SMALL, tokenizer, seed=0, vocab=1600, max_model_len=4096)
    assert made.natural_text
    assert made.notes == ()
    text = tokenizer.decode(made.source.request(0).prompt_token_ids)
    assert text.startswith("00000000")
    assert len(text.split()) > 10
    special = tokenizer.space.special_ids
    assert special
    assert not special & {token for i in range(BLOCK) for token in made.source.request(i).prompt_token_ids}


def test_without_a_tokenizer_ids_are_random_and_the_user_is_told() -> None:
    made = materialise(SMALL, None, seed=0, vocab=1600, max_model_len=4096)
    assert not made.natural_text
    assert "random token ids" in made.notes[0]
    ids = {token for i in range(BLOCK) for token in made.source.request(i).prompt_token_ids}
    assert min(ids) >= 200
    assert max(ids) < 1500


def test_a_simulation_needs_lengths_only() -> None:
    made = materialise(CHAT, None, seed=0, vocab=151_936, max_model_len=8192, prompts=False)
    assert made.source.request(3).prompt_token_ids == ()
    assert made.notes == ()


def test_a_source_survives_json(tokenizer: TextTokenizer) -> None:
    for workload in (SMALL, TALK, prefix_repetition(prefix_tokens=40, suffix_tokens=20, prefixes=3, output_tokens=9)):
        source = make(workload, tokenizer).with_observed({3: 7})
        again = RequestSource.from_json(json.loads(json.dumps(source.to_json())))
        assert [again.request(i) for i in range(80)] == [source.request(i) for i in range(80)]


def test_observed_ends_are_replayed_with_ignore_eos(tokenizer: TextTokenizer) -> None:
    made = materialise(SMALL, tokenizer, seed=0, vocab=1600, max_model_len=4096, natural_ends=True)
    assert not made.source.request(0).ignore_eos
    replayed = made.source.with_observed({0: 3})
    assert (replayed.request(0).max_tokens, replayed.request(0).ignore_eos) == (3, True)


def test_a_workload_longer_than_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"32000 \+ 100 = 32100 tokens.*max_model_len is 16384") as refused:
        materialise(NAMED["long-context"], None, seed=0, vocab=32000, max_model_len=16384)
    assert "max_model_len=32100" in refused.value.hint


def test_an_unknown_workload_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="chat, throughput, long-context, generation") as refused:
        named("troughput")
    assert "throughput" in refused.value.hint


def test_sampling_is_that_of_the_server_unless_stated(tokenizer: TextTokenizer) -> None:
    serving = {"temperature": 0.6, "top_k": 20}
    made = materialise(SMALL, tokenizer, seed=0, vocab=1600, max_model_len=4096, sampling=serving)
    assert made.source.request(0).sampling == serving
    stated = replace(SMALL, sampling={"temperature": 0.0})
    made = materialise(stated, tokenizer, seed=0, vocab=1600, max_model_len=4096, sampling=serving)
    assert made.source.request(0).sampling == {"temperature": 0.0}


def test_a_schema_is_part_of_every_request_and_ends_by_itself(tokenizer: TextTokenizer) -> None:
    request = make(replace(SMALL, schema={"type": "object"}), tokenizer).request(0)
    assert request.sampling["structured_outputs"] == {"json": {"type": "object"}}
    assert not request.ignore_eos


def test_the_digest_covers_what_shapes_requests_and_not_the_name() -> None:
    variants = [
        SMALL,
        replace(SMALL, lengths=CHAT.lengths),
        replace(SMALL, sampling={"temperature": 0.5}),
        replace(SMALL, schema={"type": "object"}),
        replace(SMALL, natural_text=False),
        replace(SMALL, reuse=Reuse(2, 16, 0.2)),
        TALK,
        replace(SMALL, recorded=(Recorded(20, 5, sha256="a"),)),
        replace(SMALL, recorded=(Recorded(20, 5, sha256="b"),)),
    ]
    assert len({workload.digest for workload in variants}) == len(variants)
    assert replace(SMALL, name="other").digest == SMALL.digest
    assert Workload.from_json(json.loads(json.dumps(TALK.to_json()))) == TALK


def test_facts_and_the_longest_requests() -> None:
    facts = CHAT.facts()
    assert facts["mean_prompt_tokens"] == pytest.approx(342, abs=0.5)
    assert facts["max_total_tokens"] == max(map(sum, CHAT.lengths.block()))
    assert facts["reuse_share"] == 0
    longest = CHAT.longest()
    assert {sum(pair) for pair in longest.request_lengths()} == {facts["max_total_tokens"]}
    assert TALK.longest().facts()["max_total_tokens"] == TALK.facts()["max_total_tokens"]


def test_prompts_of_a_prefix_repetition_share_their_beginnings(tokenizer: TextTokenizer) -> None:
    workload = prefix_repetition(prefix_tokens=64, suffix_tokens=32, prefixes=3, output_tokens=10)
    source = make(workload, tokenizer)
    prompts = [source.request(index).prompt_token_ids for index in range(300)]
    assert len({prompt[:64] for prompt in prompts}) == 3
    assert len(set(prompts)) == 300
    seen = sum(shared_prefix_tokens(prompts).seen_before) / sum(map(len, prompts))
    assert seen == pytest.approx(workload.facts()["reuse_share"], abs=0.02)


# Sessions


def test_each_turn_sends_the_history_again(tokenizer: TextTokenizer) -> None:
    source = make(TALK, tokenizer)
    for visit in range(40):
        turns = [source.request(index) for index in source.visit(visit)]
        assert [turn.turn for turn in turns] == [0, 1, 2, 3]
        assert [turn.think_s for turn in turns] == [0, 3, 3, 3]
        for earlier, later in pairwise(turns):
            assert later.prompt_token_ids[: earlier.prompt_tokens] == earlier.prompt_token_ids
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.max_tokens
        assert len({turn.session for turn in turns}) == 1


def test_sessions_share_the_system_prompt_and_nothing_else(tokenizer: TextTokenizer) -> None:
    source = make(TALK, tokenizer)
    firsts = [source.request(source.visit(visit)[0]).prompt_token_ids for visit in range(500)]
    assert len({first[:32] for first in firsts}) == 1
    assert len({first[32 : 32 + HEADER_DIGITS] for first in firsts}) == 500


@given(index=st.integers(0, 10_000), turns=st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple))
def test_places_and_visits_are_each_others_inverse(index: int, turns: tuple[int, ...]) -> None:
    source = RequestSource(lengths=((20, 2),) * sum(turns), turns=turns)
    visit, turn = source.place(index)
    assert source.visit(visit)[turn] == index


def test_declared_reuse_of_sessions_is_what_the_prompts_show(tokenizer: TextTokenizer) -> None:
    source = make(TALK, tokenizer)
    prompts = [source.request(index).prompt_token_ids for index in range(64 * 4)]
    seen = sum(shared_prefix_tokens(prompts).seen_before) / sum(map(len, prompts))
    assert seen == pytest.approx(TALK.facts()["reuse_share"], abs=0.05)


def test_history_grows_by_words_and_answers() -> None:
    shape = SessionShape(turns=2, system_tokens=100)
    assert with_history([(10, 5), (20, 6), (30, 7)], shape) == ((118, 5), (143, 6))
    with pytest.raises(ValueError, match="sessions of 2 turns"):
        with_history([(1, 1)], shape)
    with pytest.raises(ValueError, match="turns=0"):
        SessionShape(turns=0)


# Recordings


def test_recorded_prompts_are_sent_as_they_are_behind_their_number(tokenizer: TextTokenizer) -> None:
    texts = [f"Question {i}: why does the ferry wait for the tide?" for i in range(10)]
    recorded = tuple(Recorded(len(ids := tokenizer.encode(text)), 5 + i, ids, text) for i, text in enumerate(texts))
    source = make(Workload("log", Lengths(), recorded=recorded), tokenizer)
    sent = {tokenizer.decode(source.request(index).prompt_token_ids)[HEADER_DIGITS:] for index in range(10)}
    assert sent == set(texts)
    again = [source.request(index).prompt_sha256 for index in range(30)]
    assert len(set(again)) == 30, "the second pass through the file repeats no prompt"


def test_beginnings_that_recorded_prompts_share_stay_shared(tokenizer: TextTokenizer) -> None:
    system = "You are the assistant of a harbour town. Answer in one sentence and name the ferry. " * 3
    texts = [system + f"Question {i}: when does the ferry leave the old pier?" for i in range(8)]
    recorded = tuple(Recorded(len(ids := tokenizer.encode(text)), 5, ids, text) for text in texts)
    made = materialise(Workload("log", Lengths(), recorded=recorded), tokenizer, seed=0, vocab=1600, max_model_len=4096)
    assert made.reuse_share > 0.3
    assert any("share beginnings" in note for note in made.notes)
    prompts = [made.source.request(index).prompt_token_ids for index in range(24)]
    assert len(set(prompts)) == 24
    assert sum(shared_prefix_tokens(prompts).seen_before) / sum(map(len, prompts)) > made.reuse_share * 0.9


def test_a_replay_keeps_order_and_times(tokenizer: TextTokenizer) -> None:
    recorded = tuple(Recorded(20 + i, 5, at_s=float(10 - i), sampling={"top_k": i + 1}) for i in range(5))
    source = make(Workload("log", Lengths(), recorded=recorded), tokenizer, replay=True)
    requests = [source.request(index) for index in range(5)]
    assert [request.scheduled_s for request in requests] == [6, 7, 8, 9, 10]
    assert [request.prompt_tokens for request in requests] == [24, 23, 22, 21, 20]
    assert [request.sampling["top_k"] for request in requests] == [5, 4, 3, 2, 1]
    with pytest.raises(UsageError, match="cannot be replayed"):
        make(Workload("log", Lengths(), recorded=(Recorded(20, 5),)), tokenizer, replay=True)


def test_a_large_recording_is_thinned_over_all_lengths_and_says_so() -> None:
    recorded = tuple(Recorded(20 + i % 1000, 5) for i in range(10_000))
    workload = Workload("log", Lengths(), recorded=recorded)
    made = materialise(workload, None, seed=0, vocab=1600, max_model_len=4096, prompts=False)
    assert len(made.source.lengths) == 4096
    assert "4096 of the 10000 recorded requests are used" in made.notes[0]
    mean = sum(prompt for prompt, _ in made.source.lengths) / 4096
    assert mean == pytest.approx(workload.facts()["mean_prompt_tokens"], rel=0.01)


def test_stored_workloads_hold_no_prompts() -> None:
    entry = Recorded(5, 5, (11111, 22222), "the secret word", "be kind", sha256="ab")
    stored = json.dumps(Workload("log", Lengths(), recorded=(entry,)).to_json())
    assert "secret" not in stored
    assert "11111" not in stored
    assert "secret" not in repr(entry)


def test_chat_requests_carry_text(tokenizer: TextTokenizer) -> None:
    made = materialise(SMALL, tokenizer, seed=0, vocab=1600, max_model_len=4096, chat=True)
    messages = [made.source.request(index).messages for index in range(100)]
    assert all(message[0]["role"] == "user" for message in messages)
    assert len({message[0]["content"] for message in messages}) == 100
    with pytest.raises(UsageError, match="chat endpoint takes text"):
        materialise(SMALL, None, seed=0, vocab=1600, max_model_len=4096, chat=True)
