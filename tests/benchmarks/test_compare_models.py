"""`benchmarks/compare_models.py`: PyTorch's contenders take our steps, and what its goals say."""

from typing import Any

import numpy as np
import pytest

from benchmarks import model_data
from benchmarks.compare_models import TINY_JOBS, goals_of
from benchmarks.contenders import COMPARED
from benchmarks.peers.eqtrain_models import make_stepper, write_weights
from benchmarks.sharding import require_same_losses
from tests.tiers import default


def losses_of(run: Any) -> list[float]:
    return [run(1) for _ in range(COMPARED)]


@pytest.mark.parametrize("model", default(list(TINY_JOBS), ["resnet18"]))
def test_torch_takes_our_steps(model, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.peers import torch_models

    job, weights = TINY_JOBS[model], tmp_path / "weights.safetensors"
    write_weights(weights, job.config)
    batch = model_data.made_up_batch(**job.batch)
    losses = {
        "eqtrain": losses_of(make_stepper(batch, job.config, str(weights))),
        "torch": losses_of(torch_models.make_stepper(False, batch, job.config, str(weights))),
    }
    require_same_losses(losses)
    assert len(set(losses["eqtrain"])) == COMPARED  # it trains
    name = "labels" if "labels" in batch else "label"
    other = {**batch, name: np.zeros_like(batch[name])}
    wrong = losses_of(torch_models.make_stepper(False, other, job.config, str(weights)))
    with pytest.raises(RuntimeError, match="must take the same steps"):
        require_same_losses({**losses, "torch": wrong})


def test_torch_refuses_weights_of_another_model(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.peers import torch_models

    job, weights = TINY_JOBS["llama"], tmp_path / "weights.safetensors"
    write_weights(weights, {**job.config, "num_layers": 1})
    batch = model_data.made_up_batch(**job.batch)
    with pytest.raises(ValueError, match="Weights must fill the model"):
        torch_models.make_stepper(False, batch, job.config, str(weights))


def test_labels_are_the_tokens_one_further():
    batch = model_data.text(rows=3, length=8, vocabulary=64)
    assert batch["tokens"].shape == batch["labels"].shape == (3, 8)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


def test_goals_are_read_from_the_better_peer():
    def line(name: str, peak: int, over: float | None = None) -> dict[str, Any]:
        ratio = {} if over is None else {"over_eqtrain": {"median": over}}
        return {"model": "resnet18", "contender": name, "peak_bytes": peak, **ratio}

    ours = line("eqtrain", 10)
    goals = goals_of([ours, line("torch", 12, 1.4), line("torch_compile", 9, 1.05)])
    assert list(goals.values()) == [False, False]
    assert list(goals_of([ours, line("torch", 12, 1.4)]).values()) == [True, True]
    assert goals_of([ours]) == {}
