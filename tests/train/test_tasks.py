"""Tasks made from a text: one right choice of four, the same items every time, and a figure that a model can earn."""

import pytest

import offline_tasks
from tests.hf.words import save_model, texts, write_text


@pytest.mark.parametrize("task", offline_tasks.TASKS)
def test_every_item_has_one_right_choice_which_follows_in_the_text(tmp_path, task):
    path = str(write_text(tmp_path / "text.txt", documents=6, length=80))
    found = offline_tasks.items(path, task, 20)
    assert found == offline_tasks.items(path, task, 20)
    for context, choices, place in found:
        assert len({*choices}) == 4
        assert any(f"{context} {choices[place]}" in text for text in texts(6, 80))
        if task == "order":
            assert len({tuple(sorted(choice.split())) for choice in choices}) == 1


def test_a_model_takes_the_choice_that_it_finds_likeliest(tmp_path):
    path = str(write_text(tmp_path / "text.txt", documents=6, length=80))
    folder = str(save_model(tmp_path / "model", capacity=0.5))
    found = offline_tasks.accuracy(folder, path, 8, "cpu")
    assert found == offline_tasks.accuracy(folder, path, 8, "cpu")
    model = offline_tasks.open_model(folder, "cpu")
    for task, share in found.items():
        each = [
            (offline_tasks.likelihoods(model, c, choices), place)
            for c, choices, place in offline_tasks.items(path, task, 8)
        ]
        assert share == sum(max(scores) == scores[place] for scores, place in each) / 8
