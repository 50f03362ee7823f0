"""The model of text gives scores for every character, and streams what it spells."""

import pytest
import torch

from weft.demo.speller import IntegratingCell, Speller, spell


@pytest.fixture
def model() -> Speller:
    torch.manual_seed(0)
    return Speller(5, 4, 8, backend="eager")


def test_a_chunk_after_a_chunk_gives_the_scores_of_the_whole(model: Speller) -> None:
    numbers = torch.randint(5, (9, 3))
    whole, _ = model(numbers)
    first, state = model(numbers[:4])
    second, _ = model(numbers[4:], state)
    assert whole.shape == (9, 3, 5)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_the_cell_multiplies_its_products_and_couples_its_gates() -> None:
    cell = IntegratingCell(3, 4).double()
    x, h, c = torch.randn(2, 3).double(), torch.randn(2, 4).double(), torch.randn(2, 4).double()
    _, (seen, held) = cell(x, (h, c))
    a, b = x @ cell.input.weight.T + cell.input.bias, h @ cell.recurrent.weight.T
    gates = [a[:, i : i + 4] + b[:, i : i + 4] + 0.5 * a[:, i : i + 4] * b[:, i : i + 4] for i in (0, 4, 8)]
    keep, show = gates[0].sigmoid(), gates[1].sigmoid()
    wanted = keep * c + (1 - keep) * gates[2].tanh()
    torch.testing.assert_close(held, wanted)
    normed = (wanted - wanted.mean(1, keepdim=True)) / (wanted.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(seen, show * normed)


def test_what_it_spells_depends_on_the_prompt_and_the_generator_only(model: Speller) -> None:
    def spelled(prompt: list[int], seed: int) -> list[int]:
        torch.manual_seed(seed)
        return spell(model, prompt, 40)

    assert len(spelled([1], 0)) == 40 and set(spelled([1], 0)) <= set(range(5))
    assert spelled([1, 2], 0) == spelled([1, 2], 0) != spelled([1, 2], 1)


def test_each_character_is_drawn_from_the_scores_after_all_before_it(model: Speller) -> None:
    with torch.no_grad():
        model.embedding.weight.mul_(10)
        model.scores.weight.mul_(200)  # so sure of itself that every draw is the likeliest
    prompt = [3, 1, 4]
    found = spell(model, prompt, 12)
    scores, _ = model(torch.tensor([prompt + found])[:, :-1].t())
    assert scores[len(prompt) - 1 :, 0].argmax(-1).tolist() == found
    assert len(set(found)) > 1, "the law would hold for a constant too"
