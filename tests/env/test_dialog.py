"""Conversations as tokens: what was sampled is what is trained, and what is shown is what the chat template shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.env import Content
from millstream.errors import DataError, EnvironmentFailed
from millstream.types import Finish, Message, Rollout, Task
from support.talk import CHATML, NO_SYSTEM, QWEN3, Scripted, text_with

CHAT = Task(
    id="1", prompt=(Message(role="system", content="Be brief."), Message(role="user", content="not shown by itself"))
)


def user(content: str) -> tuple[Message, ...]:
    return (Message(role="user", content=content),)


def play(scripted: Scripted, *asked: Content) -> tuple[list[str], tuple[Rollout, ...]]:
    async def all_turns() -> list[str]:
        return [await scripted.context.ask(content) for content in asked]

    return asyncio.run(all_turns()), scripted.episode.finish(1.0)


def masked(rollout: Rollout) -> list[int]:
    return rollout.tokens[rollout.loss_mask].tolist()


def test_a_chat_is_shown_as_the_template_shows_it_and_only_what_was_sampled_is_trained() -> None:
    scripted = Scripted(text_with(CHATML), ["four", "five"])
    said, (rollout,) = play(scripted, user("2+2?"), user("2+3?"))
    assert said == ["four", "five"]
    whole = [*user("2+2?"), Message(role="assistant", content="four"), *user("2+3?")]
    assert scripted.shown(rollout.tokens) == scripted.text.render(whole) + "five<|im_end|>"
    assert masked(rollout) == [token for turn in scripted.said for token in turn.tokens]


def test_the_end_of_a_turn_that_was_sampled_is_trained_and_not_repeated() -> None:
    scripted = Scripted(text_with(CHATML), ["four", "five"])
    _, (rollout,) = play(scripted, user("a"), user("b"))
    assert scripted.shown(rollout.tokens).count("four<|im_end|>\n<|im_start|>user") == 1
    assert scripted.shown(masked(rollout)) == "four<|im_end|>five<|im_end|>"


def test_a_turn_that_was_cut_is_ended_and_that_end_is_not_trained() -> None:
    scripted = Scripted(text_with(CHATML), ["fou...", "five"])
    _, (rollout,) = play(scripted, user("a"), user("b"))
    assert "fou<|im_end|>\n<|im_start|>user\nb<|im_end|>" in scripted.shown(rollout.tokens)
    assert scripted.shown(masked(rollout)) == "foufive<|im_end|>"


def test_a_string_is_a_user_turn_where_the_task_is_a_chat_and_its_system_message_comes_first() -> None:
    scripted = Scripted(text_with(CHATML), ["yes", "no"], task=CHAT)
    _, (rollout,) = play(scripted, "ready?", "sure?")
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nready?<|im_end|>\n<|im_start|>assistant\n"
    assert scripted.shown(rollout.tokens).startswith(begin + "yes<|im_end|>\n<|im_start|>user\nsure?")


def test_a_string_is_plain_text_otherwise_and_stands_there_as_it_is() -> None:
    scripted = Scripted(text_with(CHATML), ["b", "d"])
    _, (rollout,) = play(scripted, "a", "c")
    assert scripted.shown(rollout.tokens) == "ab<|im_end|>cd<|im_end|>"
    no_template = Scripted(text_with(None), ["b"], task=CHAT)
    _, (rollout,) = play(no_template, "a")
    assert no_template.shown(rollout.tokens) == "ab<|im_end|>"


def test_messages_need_a_template_and_a_plain_conversation_stays_one() -> None:
    with pytest.raises(DataError, match="the model's tokenizer has no chat template"):
        play(Scripted(text_with(None), ["b"]), user("a"))
    with pytest.raises(EnvironmentFailed, match="began as plain text"):
        play(Scripted(text_with(CHATML), ["b", "c"]), "a", user("b"))


def test_a_template_with_space_before_its_end_of_turn_and_no_generation_prompt_is_followed() -> None:
    scripted = Scripted(text_with(NO_SYSTEM), ["four", "fi...", "six"])
    _, (rollout,) = play(scripted, user("a"), user("b"), user("c"))
    assert scripted.shown(rollout.tokens) == (
        "[INST] a [/INST]four<|im_end|>[INST] b [/INST]fi <|im_end|>[INST] c [/INST]six<|im_end|>"
    )


def test_a_template_that_refuses_system_messages_says_so_by_name() -> None:
    with pytest.raises(DataError, match="template refuses a chat of system, user: System role not supported"):
        play(Scripted(text_with(NO_SYSTEM), ["b"], task=CHAT), "a")


def test_a_template_that_does_not_show_what_was_said_is_refused() -> None:
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(EnvironmentFailed, match="does not render the assistant's turn exactly once"):
        play(Scripted(text_with(silent), ["b", "c"]), user("a"), user("b"))


THOUGHT = "<think>\nhm\n</think>\n\nfour"


def test_thinking_is_kept_in_one_sequence_by_default() -> None:
    scripted = Scripted(text_with(QWEN3), [THOUGHT, "five"])
    _, (rollout,) = play(scripted, user("a"), user("b"))
    assert scripted.shown(rollout.tokens).count("hm") == 1
    assert masked(rollout) == [token for turn in scripted.said for token in turn.tokens]


def test_thinking_that_the_template_removes_begins_a_new_part_with_what_the_template_shows() -> None:
    scripted = Scripted(text_with(QWEN3), [THOUGHT, "<think>\nso\n</think>\n\nfive"], thinking="drop", max_parts=2)
    _, parts = play(scripted, user("a"), user("b"))
    assert [part.part for part in parts] == [0, 1] and [part.agent for part in parts] == [0, 0]
    first, second = (scripted.shown(part.tokens) for part in parts)
    assert first == scripted.text.render(user("a")) + THOUGHT + "<|im_end|>"
    history = [*user("a"), Message(role="assistant", content=THOUGHT), *user("b")]
    assert second == scripted.text.render(history) + "<think>\nso\n</think>\n\nfive<|im_end|>"
    assert "hm" not in second and "four" in second
    assert [masked(part) for part in parts] == [list(turn.tokens) for turn in scripted.said]


def test_where_nothing_is_removed_dropping_is_keeping() -> None:
    kept = play(Scripted(text_with(QWEN3), ["four", "five"]), user("a"), user("b"))[1]
    dropped = play(Scripted(text_with(QWEN3), ["four", "five"], thinking="drop"), user("a"), user("b"))[1]
    assert len(dropped) == 1 and dropped[0].tokens.tolist() == kept[0].tokens.tolist()


def test_more_parts_than_allowed_fail_with_what_to_set() -> None:
    with pytest.raises(EnvironmentFailed, match=r"more than 1 sequences in one rollout: set rollout\.max_parts"):
        play(Scripted(text_with(QWEN3), [THOUGHT, "five"], thinking="drop"), user("a"), user("b"))


words = st.text("abc <>/.\n", max_size=12)
turns = st.lists(st.tuples(words, st.booleans(), st.booleans()), min_size=1, max_size=5)


@given(turns=turns, template=st.sampled_from([CHATML, QWEN3, NO_SYSTEM]), thinking=st.sampled_from(["keep", "drop"]))
def test_whatever_is_said_the_trained_tokens_are_the_sampled_ones(
    turns: Sequence[tuple[str, bool, bool]], template: str, thinking: str
) -> None:
    """A turn: what the model says, whether it thinks before, whether it is cut."""
    says = [
        ("<think>t</think>" if thinks else "") + said + ("x..." if is_cut else "") for said, thinks, is_cut in turns
    ]
    scripted = Scripted(text_with(template), says, thinking=thinking, max_parts=5)
    _, parts = play(scripted, *(user(f"q{number}") for number in range(len(says))))
    sampled = [token for part in parts for token in masked(part)]
    assert sampled == [token for turn in scripted.said for token in turn.tokens]
    assert [logprob for part in parts for logprob in part.logprobs[part.loss_mask].tolist()] == pytest.approx(
        [logprob for turn in scripted.said for logprob in turn.logprobs]
    )
    for part in parts:
        assert (part.versions[~part.loss_mask] == -1).all() and (part.versions[part.loss_mask] == 3).all()
    if thinking == "keep":
        assert len(parts) == 1
        for request, later in zip(scripted.requests, scripted.requests[1:], strict=False):
            assert later.tokens[: len(request.tokens)] == request.tokens, "a conversation only grows"
    assert parts[-1].finish is (Finish.LENGTH if turns[-1][2] else Finish.STOP)
